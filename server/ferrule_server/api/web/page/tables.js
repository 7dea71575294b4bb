// Principals, and what was counted since the start.
import { count, element, num, percent, seconds } from "./format.js";

/** Fills the table of principals; `recent` is what each did over the last seconds. */
export function showPrincipals(view, recent) {
  const principals = [...(view.principals ?? [])].sort((one, other) => ((one.principal ?? "") < (other.principal ?? "") ? -1 : 1));
  const known = num(view.known_principals);
  const all = principals.length < known ? `The ${principals.length} most recently active of ${count(known)}` : `${count(known)} known`;
  document.getElementById("principals-note").textContent = `${all}; rates and means over the last five seconds.`;
  const titles = [...document.querySelectorAll("#principals th")].map((each) => each.textContent);
  const rows = principals.map((each) => rowOf(each, recent.get(each.principal ?? ""), titles));
  document.querySelector("#principals tbody").replaceChildren(...rows);
}

function rowOf(each, recent, [, ...titles]) {
  const row = element("tr");
  const name = element("td", "", each.principal ?? "");
  name.title = each.principal ?? "";
  row.append(name);
  const cells = [
    count(num(each.live_sequences)),
    count(num(each.kv_tokens)),
    count(num(each.queued_jobs)),
    recent ? count(recent.tokens) : "0",
    recent ? seconds(recent.queue) : "–",
    recent ? seconds(recent.run) : "–",
  ];
  row.append(...cells.map((text) => element("td", "", text)));
  titles.forEach((title, index) => (row.cells[index + 1].dataset.title = title));
  return row;
}

/** Fills the list of totals; what was refused comes last, by its reason. */
export function showTotals(view) {
  const { status = {}, cache_metrics: cache = {} } = view;
  const lookup = num(cache.num_prefix_lookup_tokens);
  const drafts = num(status.num_draft_tokens);
  const totals = [
    ["Steps", count(num(status.num_steps))],
    ["Decoded", count(num(status.num_decode_tokens))],
    ["Prompt tokens", count(num(status.num_prefill_tokens))],
    ["Prefix hits", lookup ? `${percent(num(cache.num_prefix_hit_tokens), lookup).toFixed(0)} %` : "–"],
    ["Drafts kept", drafts ? `${percent(num(status.num_accepted_tokens), drafts).toFixed(0)} %` : "–"],
    ["Created", count(num(cache.num_created))],
    ["Forks", count(num(cache.num_forks))],
    ["Truncates", count(num(cache.num_truncates))],
    ["Released", count(num(cache.num_released))],
    ["Leases ended", count(num(cache.num_expired))],
    ["Copied blocks", count(num(cache.num_block_copies))],
    ["Replays", count(num(cache.num_replays))],
  ].map(([name, text]) => pair(name, text));
  const refused = Object.entries(view.num_refused ?? {}).sort(([one], [other]) => (one < other ? -1 : 1));
  totals.push(...refused.map(([reason, number]) => pair(reason, count(num(number)), "refused")));
  document.getElementById("totals").replaceChildren(...totals);
  const sum = refused.reduce((sum, [, number]) => sum + num(number), 0);
  document.getElementById("totals-note").textContent = sum ? `${count(sum)} jobs were refused, for the reasons that come last.` : "No job was refused.";
}

function pair(name, text, className = "") {
  const made = element("div", className);
  const title = element("dt", "", name);
  title.title = name;
  made.append(title, element("dd", "", text));
  return made;
}
