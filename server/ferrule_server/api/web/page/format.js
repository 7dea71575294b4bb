// Numbers as people read them, and the proto's JSON as numbers.

const whole = new Intl.NumberFormat("en", { maximumFractionDigits: 0 });

/** A number of a JSON message: 64-bit ones come as text, durations as "1.5s", what is unset not at all. */
export const num = (value) => Number.parseFloat(value ?? 0) || 0;

/** The bytes of a base64 field. */
export const bytes = (text) => Uint8Array.from(atob(text ?? ""), (each) => each.charCodeAt(0));

/** 1234567 as "1,234,567", and small ones with a digit behind the point. */
export function count(value) {
  if (value === null || !Number.isFinite(value)) return "–";
  return value > 0 && value < 10 && !Number.isInteger(value) ? value.toFixed(1) : whole.format(value);
}

/** Seconds as number and unit: ["1.25", "ms"]. */
export function duration(seconds) {
  if (seconds === null || !Number.isFinite(seconds)) return ["–", ""];
  if (seconds >= 1) return [digits(seconds), "s"];
  return seconds >= 1e-3 ? [digits(seconds * 1e3), "ms"] : [digits(seconds * 1e6), "µs"];
}

/** Seconds as text. */
export const seconds = (value) => duration(value).join(" ").trim();

/** A time people live in: "42 s", "5 min", "3 h", "2 d". */
export function span(value) {
  if (value < 90) return `${Math.floor(value)} s`;
  if (value < 5400) return `${Math.round(value / 60)} min`;
  return value < 172800 ? `${Math.round(value / 3600)} h` : `${Math.round(value / 86400)} d`;
}

/** "1 block", "2 blocks". */
export const some = (number, noun) => `${whole.format(number)} ${noun}${number === 1 ? "" : "s"}`;

/** The share as "42", of a hundred. */
export const percent = (part, all) => (all > 0 ? (part / all) * 100 : 0);

function digits(value) {
  return value >= 100 ? value.toFixed(0) : value >= 10 ? value.toFixed(1) : value.toFixed(2);
}

/** An element with text. */
export function element(name, className, text) {
  const made = document.createElement(name);
  if (className) made.className = className;
  if (text !== undefined) made.textContent = text;
  return made;
}

/** An SVG element with attributes. */
export function shape(name, attributes = {}) {
  const made = document.createElementNS("http://www.w3.org/2000/svg", name);
  for (const [key, value] of Object.entries(attributes)) made.setAttribute(key, value);
  return made;
}
