// Builds elements. Whatever a node, a model or a prompt says goes in as text or as an attribute's value, never as markup.

const SVG = "http://www.w3.org/2000/svg";

// What a table says of a key that somebody else chose ("__proto__" included).
export const pick = (table, key, otherwise) => (Object.hasOwn(table, key) ? table[key] : otherwise);

export const $ = (id) => document.getElementById(id);

export function el(tag, attributes = {}, ...children) {
  return filled(document.createElement(tag), attributes, children);
}

export function svg(tag, attributes = {}, ...children) {
  return filled(document.createElementNS(SVG, tag), attributes, children);
}

function filled(element, attributes, children) {
  for (const [name, value] of Object.entries(attributes)) {
    if (value === false || value === null || value === undefined) continue;
    if (name === "on") for (const [event, run] of Object.entries(value)) element.addEventListener(event, run);
    else if (name === "place") for (const [property, size] of Object.entries(value)) element.style.setProperty(property, size);
    else element.setAttribute(name, value === true ? "" : String(value));
  }
  element.append(...children.flat(Infinity).filter((child) => child !== null && child !== undefined && child !== false));
  return element;
}

// Replaces the children of `parent`, keeping those whose key is already there, so that focus and scrolling survive.
export function keyed(parent, items, keyOf, make, update) {
  const old = new Map([...parent.children].map((child) => [child.dataset.key, child]));
  let at = parent.firstElementChild;
  for (const item of items) {
    const key = String(keyOf(item));
    let child = old.get(key);
    if (child) old.delete(key);
    else {
      child = make(item);
      child.dataset.key = key;
    }
    update(child, item);
    if (child === at) at = at.nextElementSibling;
    else parent.insertBefore(child, at);
  }
  for (const gone of old.values()) gone.remove();
}

export function say(element, text) {
  if (element.textContent !== text) element.textContent = text;
}

// --- shapes: a state is told by its form as well as by its colour ---

const SHAPES = {
  alive: "M8 2a6 6 0 1 1 0 12a6 6 0 0 1 0-12z",
  suspect: "M8 1.5l7 12.5H1z",
  dead: "M3 5.1L5.1 3 8 5.9 10.9 3 13 5.1 10.1 8l2.9 2.9-2.1 2.1L8 10.1 5.1 13 3 10.9 5.9 8z",
  left: "M8 2a6 6 0 1 1 0 12a6 6 0 0 1 0-12zm0 2.2a3.8 3.8 0 1 0 0 7.6a3.8 3.8 0 0 0 0-7.6z",
  draining: "M2 3h12L8 14z",
  loading: "M2 2h12v12H2zm2.5 2.5v7H8v-7z",
  refused: "M5 1.5h6L14.5 5v6L11 14.5H5L1.5 11V5zM4.5 7v2h7V7z",
  warning: "M8 1.5l7 12.5H1zM7.2 6v4h1.6V6zm0 5v1.4h1.6V11z",
  error: "M5 1.5h6L14.5 5v6L11 14.5H5L1.5 11V5zM7.2 4.5v4.5h1.6V4.5zm0 5.7v1.5h1.6v-1.5z",
};

export function shape(state) {
  const icon = svg("svg", { viewBox: "0 0 16 16", class: "shape", "data-state": state, "aria-hidden": "true" });
  icon.append(svg("path", { d: pick(SHAPES, state, SHAPES.left), "fill-rule": "evenodd" }));
  return icon;
}

// --- words for numbers ---

export const ms = (value) =>
  value >= 1000 ? `${(value / 1000).toFixed(1)} s` : value >= 10 ? `${value.toFixed(0)} ms` : `${value.toFixed(1)} ms`;
export const range = (layers) => `${layers[0]}..${layers[1]}`;
export const mb = (value) => (value >= 10240 ? `${(value / 1024).toFixed(0)} GB` : value >= 1024 ? `${(value / 1024).toFixed(1)} GB` : `${value} MB`);
export const percent = (share) => `${Math.round(share * 100)} %`;
