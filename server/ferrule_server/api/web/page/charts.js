// Line charts of the last five minutes; the large number is the newest value, or the one under the pointer.
import { count, duration, element, shape } from "./format.js";
import { SPAN_S } from "./series.js";

const HEIGHT = 100;
const GAP_S = 3.5;
const asCount = (value) => [count(value), ""];
const asPercent = (value) => [value === null ? "–" : value.toFixed(value < 10 && value > 0 ? 1 : 0), "%"];

/**
 * One row per chart: `first` is drawn in the accent colour, `second` behind it; `label` says what the large number is,
 * `also` what the small one is, which is `second` or what `small` names.
 */
const CHARTS = [
  { name: "Tokens per second", first: "decoded", second: "prompt", show: asCount, label: "decoded", also: "prompt", area: true },
  { name: "Rows per step", first: "rows", show: asCount, also: "steps/s", small: "steps", area: true },
  { name: "KV pool in use", first: "used", second: "held", show: asPercent, also: "with cached", top: 100, area: true },
  { name: "Step time", quantiles: "step_seconds" },
  { name: "Wait for a step", quantiles: "queue_seconds" },
  { name: "Time to first token", quantiles: "first_token_seconds" },
  { name: "Between tokens of a Generate", quantiles: "inter_token_seconds" },
  { name: "Decode of a client's own loop", quantiles: "decode_seconds" },
].map((chart) =>
  chart.quantiles
    ? { ...chart, first: `${chart.quantiles}_p50`, second: `${chart.quantiles}_p99`, show: duration, label: "p50", also: "p99", floor: 1e-4 }
    : chart,
);

/** Makes the charts in an element; returns what draws points into them. */
export function makeCharts(parent) {
  const charts = CHARTS.map((chart) => new Chart(chart));
  parent.append(...charts.map((chart) => chart.figure));
  return (points) => charts.forEach((chart) => chart.draw(points));
}

class Chart {
  #spec;
  #points = [];
  #age = null;
  #parts = {};

  constructor(spec) {
    this.#spec = spec;
    this.figure = element("figure");
    this.figure.tabIndex = 0;
    this.figure.dataset.chart = spec.first;
    const caption = element("figcaption");
    for (const part of ["name", "when", "value", "also"]) caption.append((this.#parts[part] = element("span", part)));
    this.#parts.name.textContent = spec.name;
    this.figure.append(caption, this.#makePlot(), this.#makeEnds());
    this.figure.addEventListener("keydown", (event) => this.#onKey(event));
    this.figure.addEventListener("blur", () => this.#point(null));
  }

  #makePlot() {
    const plot = element("div", "plot");
    const svg = shape("svg", { viewBox: `0 0 ${SPAN_S} ${HEIGHT}`, preserveAspectRatio: "none", "aria-hidden": "true" });
    for (const part of ["grid", "areaSecond", "area", "second", "first", "cursor"]) {
      svg.append((this.#parts[part] = shape("path", { class: part === "areaSecond" ? "area second" : part })));
    }
    this.#parts.grid.setAttribute("d", `M0 0H${SPAN_S}M0 ${HEIGHT / 2}H${SPAN_S}M0 ${HEIGHT}H${SPAN_S}`);
    this.#parts.top = element("span");
    this.#parts.middle = element("span");
    this.#parts.top.style.top = "0";
    this.#parts.middle.style.top = "50%";
    plot.append(svg, this.#parts.top, this.#parts.middle);
    plot.addEventListener("pointermove", (event) => {
      const box = plot.getBoundingClientRect();
      this.#point(Math.max(0, (1 - (event.clientX - box.left) / box.width) * SPAN_S));
    });
    plot.addEventListener("pointerleave", () => this.#point(null));
    return plot;
  }

  #makeEnds() {
    const ends = element("div", "ends");
    ends.append(element("span", "", "5 min ago"), element("span", "", "now"));
    return ends;
  }

  #onKey(event) {
    const by = { ArrowLeft: 5, ArrowRight: -5 }[event.key];
    if (by === undefined) return;
    event.preventDefault();
    this.#point(Math.min(SPAN_S, Math.max(0, (this.#age ?? 0) + by)));
  }

  #point(age) {
    this.#age = age;
    this.#say();
  }

  draw(points) {
    this.#points = points;
    const { first, second, area } = this.#spec;
    const top = this.#top();
    this.#parts.first.setAttribute("d", lines(points, first, top));
    if (second) this.#parts.second.setAttribute("d", lines(points, second, top));
    if (area) this.#parts.area.setAttribute("d", lines(points, first, top, true));
    if (area && second) this.#parts.areaSecond.setAttribute("d", lines(points, second, top, true));
    this.#parts.top.textContent = this.#spec.show(top).join(" ");
    this.#parts.middle.textContent = this.#spec.show(top / 2).join(" ");
    this.#say();
  }

  /** The end of the axis: a round number above all that is drawn. */
  #top() {
    const { first, second, top, floor = 1 } = this.#spec;
    if (top) return top;
    const most = this.#points.reduce((most, point) => Math.max(most, point[first] ?? 0, point[second] ?? 0), floor);
    const unit = 10 ** Math.floor(Math.log10(most));
    return [1, 2, 4, 6, 8, 10].map((step) => step * unit).find((step) => step >= most * 0.999) ?? most;
  }

  /** Writes the newest values, or those of the moment pointed at. */
  #say() {
    const { first, second, small, show, also, label = "" } = this.#spec;
    const now = this.#points.at(-1);
    if (now === undefined) return;
    const at = now.at - (this.#age ?? 0);
    const point = this.#age === null ? now : nearest(this.#points, at);
    const [value, unit] = show(point[first]);
    this.#parts.value.replaceChildren(value, element("small", "", `${unit} ${label}`));
    if (also) this.#parts.also.textContent = [...show(point[small ?? second]), also].filter(Boolean).join(" ");
    this.#parts.when.textContent = this.#age === null ? "" : `${Math.round(now.at - point.at)} s ago`;
    const x = SPAN_S - (now.at - point.at);
    this.#parts.cursor.setAttribute("d", this.#age === null ? "" : `M${x} 0V${HEIGHT}`);
    this.figure.setAttribute("aria-label", `${this.#spec.name}: ${value} ${unit}; arrow keys look back`);
  }
}

function nearest(points, at) {
  return points.reduce((best, point) => (Math.abs(point.at - at) < Math.abs(best.at - at) ? point : best));
}

/** The path of a line with gaps where there is no value; closed down to the axis where `isArea`. */
function lines(points, name, top, isArea = false) {
  const now = points.at(-1)?.at ?? 0;
  let path = "";
  let last = null;
  for (const point of points) {
    const value = point[name];
    if (value === null || value === undefined) {
      if (last !== null && isArea) path += `V${HEIGHT}Z`;
      last = null;
      continue;
    }
    const x = (SPAN_S - (now - point.at)).toFixed(1);
    const y = (HEIGHT * (1 - Math.min(value / top, 1))).toFixed(1);
    const isNext = last !== null && point.at - last < GAP_S;
    if (!isNext && last !== null && isArea) path += `V${HEIGHT}Z`;
    path += isNext ? `L${x} ${y}` : isArea ? `M${x} ${HEIGHT}V${y}` : `M${x} ${y}h0.4`;
    last = point.at;
  }
  return isArea && last !== null ? `${path}V${HEIGHT}Z` : path;
}
