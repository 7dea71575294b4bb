// The block pool as a picture: one cell per block, or per run of blocks, in the colour of its owners.
import { bytes, count, num, some } from "./format.js";

const MOST = 26;
const LEAST = 5;
const MOST_HEIGHT = 420;
const LEVELS = 6;

export class Pool {
  #canvas;
  #cells = new Uint8Array();
  #fill = new Uint8Array();
  #perCell = 1;
  #total = 0;
  #columns = 1;
  #size = MOST;
  #chosen = null;

  constructor(canvas) {
    this.#canvas = canvas;
    new ResizeObserver(() => requestAnimationFrame(() => this.#draw())).observe(canvas);
    matchMedia("(prefers-color-scheme: dark)").addEventListener("change", () => this.#draw());
    canvas.addEventListener("pointermove", (event) => this.#choose(this.#cellAt(event)));
    canvas.addEventListener("pointerleave", () => this.#choose(null));
    canvas.addEventListener("blur", () => this.#choose(null));
    canvas.addEventListener("keydown", (event) => this.#onKey(event));
  }

  /** Shows the pool of a view. */
  show(view) {
    const { block_map: map = {}, cache_metrics: cache = {}, block_size: blockSize } = view;
    this.#cells = bytes(map.cells);
    this.#fill = bytes(map.fill);
    this.#perCell = num(map.cell_blocks) || 1;
    this.#total = num(cache.empty_blocks) + num(cache.cached_blocks) + num(cache.used_blocks);
    this.#tell(cache, blockSize, map.num_shared ?? []);
    this.#draw();
  }

  #tell(cache, blockSize, owners) {
    const used = num(cache.used_blocks);
    const shared = num(cache.shared_blocks);
    const isExact = this.#perCell === 1;
    const counts = { empty: num(cache.empty_blocks), cached: num(cache.cached_blocks), single: used - shared };
    [counts.by2, counts.by3, counts.many] = [0, 1, 2].map((index) => num(owners[index]));
    for (const [name, value] of Object.entries(counts)) {
      document.querySelector(`#legend [data-count="${name}"]`).textContent = count(value);
    }
    const each = isExact ? "a cell is a block" : `a cell is ${this.#perCell} blocks, filled as far as they are held`;
    const note = `${some(this.#total, "block")} of ${some(num(blockSize), "token")}, ${count(used)} held, ${count(shared)} of them shared; ${each}.`;
    document.getElementById("pool-note").textContent = note;
    this.#canvas.setAttribute("aria-label", `Picture of the block pool: ${note}`);
    this.#say();
  }

  #layout() {
    const width = this.#canvas.clientWidth;
    const number = Math.max(this.#cells.length, 1);
    const ideal = Math.floor(Math.sqrt((width * MOST_HEIGHT) / number));
    this.#size = Math.min(MOST, Math.max(LEAST, ideal));
    this.#columns = Math.max(1, Math.floor(width / this.#size));
    return [width, Math.ceil(number / this.#columns) * this.#size];
  }

  #draw() {
    const [width, height] = this.#layout();
    const ratio = window.devicePixelRatio || 1;
    const canvas = this.#canvas;
    if (!width) return;
    canvas.style.height = `${height}px`;
    canvas.width = Math.round(width * ratio);
    canvas.height = Math.round(height * ratio);
    const pen = canvas.getContext("2d");
    pen.scale(ratio, ratio);
    const style = getComputedStyle(canvas);
    const colours = Array.from({ length: LEVELS }, (_, level) => style.getPropertyValue(`--level-${level}`));
    const side = this.#size - (this.#size > 8 ? 2 : 1);
    for (const [index, cell] of this.#cells.entries()) {
      const [x, y] = this.#place(index);
      const level = Math.min(cell, LEVELS - 1);
      const isPart = this.#perCell > 1 && level >= 2 && this.#fill[index] < 255;
      pen.fillStyle = colours[isPart ? 0 : level];
      pen.fillRect(x, y, side, side);
      if (isPart) this.#drawPart(pen, colours[level], x, y, side, this.#fill[index] / 255);
    }
    if (this.#chosen !== null && this.#chosen < this.#cells.length) this.#outline(pen, style.color, side);
  }

  #drawPart(pen, colour, x, y, side, share) {
    const height = Math.max(1, Math.round(side * share));
    pen.fillStyle = colour;
    pen.fillRect(x, y + side - height, side, height);
  }

  #outline(pen, colour, side) {
    const [x, y] = this.#place(this.#chosen);
    pen.strokeStyle = colour;
    pen.lineWidth = 1.5;
    pen.strokeRect(x - 0.25, y - 0.25, side + 0.5, side + 0.5);
  }

  #place(index) {
    return [(index % this.#columns) * this.#size, Math.floor(index / this.#columns) * this.#size];
  }

  #cellAt(event) {
    const box = this.#canvas.getBoundingClientRect();
    const column = Math.floor((event.clientX - box.left) / this.#size);
    const index = Math.floor((event.clientY - box.top) / this.#size) * this.#columns + column;
    return column >= 0 && column < this.#columns && index >= 0 && index < this.#cells.length ? index : null;
  }

  #onKey(event) {
    const by = { ArrowLeft: -1, ArrowRight: 1, ArrowUp: -this.#columns, ArrowDown: this.#columns }[event.key];
    if (by === undefined || !this.#cells.length) return;
    event.preventDefault();
    this.#choose(this.#chosen === null ? 0 : Math.min(this.#cells.length - 1, Math.max(0, this.#chosen + by)));
  }

  #choose(index) {
    if (index === this.#chosen) return;
    this.#chosen = index;
    this.#draw();
    this.#say();
  }

  /** Tells the cell that is pointed at in words. */
  #say() {
    const at = this.#chosen;
    const text = at === null || at >= this.#cells.length ? "\u00a0" : this.#describe(at);
    const detail = document.getElementById("pool-cell");
    if (detail.textContent !== text) detail.textContent = text; // else it would be read out every second
  }

  #describe(at) {
    const first = 1 + at * this.#perCell;
    const last = Math.min(first + this.#perCell - 1, this.#total);
    const cell = this.#cells[at];
    const name = first === last ? `Block ${first}` : `Blocks ${first} to ${last}`;
    const states = ["empty", "cached for prompts that begin the same", "held by one owner"];
    const state = states[cell] ?? `shared by ${cell === 255 ? "254 or more" : cell - 1} owners`;
    if (first === last) return `${name}: ${state}.`;
    const held = Math.round((this.#fill[at] / 255) * (last - first + 1));
    return cell >= 2 ? `${name}: ${held} held; the most held one is ${state}.` : `${name}: ${cell ? "some " : ""}${state}.`;
  }
}
