// The fork tree: a row per sequence, its length along the axis, branches below what they branched from.
import { branchPoint, forestOf, rowsOf } from "./forest.js";
import { count, shape, some, span } from "./format.js";

const TOP = 26;
const AFTER = 92;
const BAR = 6;

export class Tree {
  #svg;
  #rows = [];
  #drawn = new Map();
  #opened = new Set();
  #forest = null;
  #chosen = null;
  #hovered = null;
  #axis = shape("g");

  constructor(svg) {
    this.#svg = svg;
    svg.append(this.#axis);
    new ResizeObserver(() => requestAnimationFrame(() => this.#draw())).observe(svg.parentElement);
    svg.addEventListener("click", (event) => this.#toggle(this.#rowAt(event)));
    svg.addEventListener("pointermove", (event) => this.#hover(this.#rowAt(event)));
    svg.addEventListener("pointerleave", () => this.#hover(null));
    svg.addEventListener("focusin", (event) => this.#choose(this.#rowAt(event)?.key ?? null));
    svg.addEventListener("keydown", (event) => this.#onKey(event));
  }

  /** Shows the live sequences of a view. */
  show(view) {
    this.#forest = forestOf(view);
    this.#tell(view);
    this.#draw();
  }

  clear() {
    this.#opened.clear();
    this.#chosen = null;
  }

  #tell(view) {
    const { nodes, trees, alone } = this.#forest;
    const total = Number(view.status?.live_sequences ?? nodes.size);
    const soon = [...nodes.values()].filter((node) => node.isSoon).length;
    const parts = [`${some(nodes.size, "sequence")}, ${some(trees.length, "tree")} and ${count(alone.length)} alone`];
    if (total > nodes.size) parts[0] = `The ${count(nodes.size)} of ${count(total)} sequences whose lease ends first`;
    if (soon) parts.push(`${some(soon, "lease")} about to end`);
    this.#note = total ? parts.join("; ") : "No sequence is alive. A prefill makes one.";
  }

  #note = "";

  #draw() {
    if (this.#forest === null) return;
    const { rows, numLeftOut } = rowsOf(this.#forest, this.#opened);
    this.#rows = rows;
    const more = numLeftOut ? `; ${some(numLeftOut, "row")} more not drawn` : "";
    document.getElementById("tree-note").textContent = `${this.#note}${more}`;
    const frame = this.#frame(rows);
    this.#svg.setAttribute("height", frame.height);
    this.#drawAxis(frame);
    const places = new Map(rows.map((row, index) => [row.key, TOP + index * frame.step + frame.step / 2]));
    for (const [key, group] of this.#drawn) if (!places.has(key)) this.#remove(key, group);
    for (const row of rows) this.#drawRow(row, frame, places);
    this.#keepReachable();
    this.#say();
  }

  #remove(key, group) {
    group.remove();
    this.#drawn.delete(key);
    if (this.#chosen === key) this.#chosen = null;
  }

  #frame(rows) {
    const width = this.#svg.parentElement.clientWidth - 12;
    const isNarrow = width < 520;
    const left = isNarrow ? 76 : 150;
    const step = rows.length > 80 ? 15 : 20;
    const most = Math.max(8, ...rows.flatMap((row) => (row.group ?? [row.node]).map((node) => node.length)));
    const unit = niceStep(most / (isNarrow ? 3 : 6));
    const scale = (width - left - AFTER) / most;
    return { width, left, step, most, unit, isNarrow, x: (tokens) => left + tokens * scale, height: TOP + rows.length * step + 4 };
  }

  #drawAxis({ x, most, unit, height }) {
    const parts = [];
    for (let tokens = 0; tokens <= most; tokens += unit) {
      const label = shape("text", { x: x(tokens), y: 9, "text-anchor": tokens ? "middle" : "start" });
      label.textContent = tokens ? count(tokens) : "0 tokens";
      parts.push(shape("path", { class: "axis", d: `M${x(tokens)} ${TOP - 8}V${height}` }), label);
    }
    if (parts.length > 2 && x(unit) - x(0) < 84) parts[1].textContent = "0";
    this.#axis.replaceChildren(...parts);
  }

  #drawRow(row, frame, places) {
    const y = places.get(row.key);
    let group = this.#drawn.get(row.key);
    if (group === undefined) {
      group = shape("g", { role: "treeitem", tabindex: "-1" });
      group.dataset.key = row.key;
      this.#drawn.set(row.key, group);
      this.#svg.append(group);
    }
    group.setAttribute("transform", `translate(0 ${y})`);
    group.setAttribute("aria-level", row.depth + 1);
    const hit = shape("rect", { class: "hit", x: 0, y: -frame.step / 2, width: frame.width, height: frame.step, rx: 3 });
    const drawn = row.node ? this.#sequence(row, frame, places, group) : this.#group(row, frame, places, group);
    group.replaceChildren(hit, ...drawn);
  }

  #sequence({ node, key, depth }, frame, places, group) {
    const { x } = frame;
    const from = branchPoint(node, node.parent);
    const shared = Math.max(from, node.shared);
    group.setAttribute("class", `row${node.isSoon ? " soon" : ""}${key === this.#chosen ? " chosen" : ""}`);
    group.dataset.handleId = node.id;
    group.setAttribute("aria-label", describe(node));
    const parts = [label(frame, depth, node.id), ...this.#link(node.parent, from, frame, places, places.get(key))];
    if (shared > from) parts.push(bar("shared", x(from), x(shared)));
    if (node.length > shared) parts.push(bar("own", x(shared), x(node.length)));
    if (node.parentId && node.parent === null) parts.push(shape("circle", { class: "gone", cx: x(0), cy: 0, r: 3.5 }));
    if (node.isAtWork || node.isSoon) parts.push(shape("circle", { class: "work", cx: x(node.length), cy: 0, r: 4.5 }));
    parts.push(end(x(node.length), node.isSoon ? `${count(node.length)} · ${node.left < 1 ? "<1" : Math.floor(node.left)} s left` : count(node.length)));
    return parts;
  }

  #group({ group: nodes, key, depth, parent, nouns, isOpen }, frame, places, element) {
    const lengths = nodes.map((node) => node.length);
    const [least, most] = [Math.min(...lengths), Math.max(...lengths)];
    const from = parent ? Math.min(...nodes.map((node) => branchPoint(node, parent))) : 0;
    const soon = nodes.filter((node) => node.isSoon).length;
    const name = `${count(nodes.length)} ${nodes.length === 1 ? nouns[0] : nouns[1]}`;
    const range = least === most ? count(most) : `${count(least)}–${count(most)}`;
    element.setAttribute("class", `row group${soon ? " soon" : ""}${key === this.#chosen ? " chosen" : ""}`);
    element.setAttribute("aria-expanded", isOpen);
    element.setAttribute("aria-label", `${name}, ${range} tokens${soon ? `, ${soon} about to end` : ""}`);
    const text = label(frame, depth, `${isOpen ? "▾" : "▸"} ${frame.isNarrow ? count(nodes.length) : name}`, true);
    return [
      text,
      ...this.#link(parent, from, frame, places, places.get(key)),
      bar("band", frame.x(from), frame.x(most)),
      bar("own", frame.x(least) - 1, frame.x(most), 2),
      end(frame.x(most), soon ? `${range} · ${soon} soon` : range),
    ];
  }

  /** The line from the parent's row down to this one, where they part. */
  #link(parent, from, { x }, places, y) {
    if (parent === null || !places.has(parent.id)) return [];
    return [shape("path", { class: "link", d: `M${x(from)} ${places.get(parent.id) - y + BAR / 2}V0` })];
  }

  #rowAt(event) {
    const key = event.target.closest?.(".row")?.dataset.key;
    return key === undefined ? null : (this.#rows.find((row) => row.key === key) ?? null);
  }

  #toggle(row) {
    if (!row?.group) return;
    if (!this.#opened.delete(row.key)) this.#opened.add(row.key);
    this.#draw();
  }

  #hover(row) {
    this.#hovered = row?.key ?? null;
    this.#say();
  }

  #choose(key) {
    this.#chosen = key;
    for (const [each, group] of this.#drawn) group.classList.toggle("chosen", each === key);
    this.#keepReachable();
    this.#say();
  }

  /** One row can be reached with Tab, the others from there with arrow keys. */
  #keepReachable() {
    const key = this.#drawn.has(this.#chosen) ? this.#chosen : this.#rows[0]?.key;
    for (const [each, group] of this.#drawn) group.setAttribute("tabindex", each === key ? 0 : -1);
  }

  #onKey(event) {
    const row = this.#rowAt(event);
    const at = this.#rows.indexOf(row);
    const to = { ArrowDown: at + 1, ArrowUp: at - 1, Home: 0, End: this.#rows.length - 1 }[event.key];
    if (to !== undefined) this.#drawn.get(this.#rows[to]?.key)?.focus();
    const isOpening = event.key === "Enter" || event.key === " " || event.key === (row?.isOpen ? "ArrowLeft" : "ArrowRight");
    if (isOpening) this.#toggle(row);
    if (to !== undefined || isOpening) event.preventDefault();
  }

  #say() {
    const row = this.#rows.find((each) => each.key === (this.#hovered ?? this.#chosen));
    const text = row?.node ? describe(row.node) : row?.group ? `${this.#drawn.get(row.key).getAttribute("aria-label")}; click to ${row.isOpen ? "close" : "open"}` : "\u00a0";
    document.getElementById("tree-detail").textContent = text;
  }
}

/** A sequence in words. */
function describe(node) {
  const from = node.parentId ? `, branch of ${node.parentId}${node.parent ? "" : ", which is gone or not listed"}` : "";
  const lease = node.isAtWork ? `at work (${some(Math.max(node.pending, 1), "job")})` : `lease ends in ${span(node.left)} of ${span(node.ttl)}`;
  return `${node.id} of ${node.principal}${from}: ${some(node.length, "token")}, ${some(node.blocks, "block")}, ${count(node.sharedBlocks)} shared; ${lease}; ${span(node.age)} old`;
}

function label({ isNarrow, left }, depth, text, isWhole = false) {
  const indent = Math.min(depth, isNarrow ? 1 : 4) * (isNarrow ? 6 : 8);
  const made = shape("text", { class: "name", x: indent, y: 0 });
  const room = Math.floor((left - indent - 10) / 7.3);
  made.textContent = isWhole && text.length > room + 2 ? `${text.slice(0, room + 1)}…` : isWhole ? text : text.slice(0, room);
  return made;
}

function bar(kind, from, to, height = BAR) {
  return shape("rect", { class: kind, x: from, y: -height / 2, width: Math.max(to - from, 1), height, rx: 1 });
}

function end(x, text) {
  const made = shape("text", { class: "end", x: x + 10, y: 0 });
  made.textContent = text;
  return made;
}

function niceStep(least) {
  const unit = 10 ** Math.floor(Math.log10(Math.max(least, 1)));
  return [1, 2, 5, 10].map((each) => each * unit).find((each) => each >= least);
}
