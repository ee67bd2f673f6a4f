// Builds elements. Text only ever becomes text nodes, so nothing a job is called or prints can become markup.

/** The element with an id that the template promises. */
export const byId = (id) => document.getElementById(id);

/**
 * An element. `props` are attributes, with `on*` functions as listeners and null or false left out;
 * children are elements or text, with null left out.
 */
export function h(tag, props = {}, ...children) {
  const element = document.createElement(tag);
  for (const [name, value] of Object.entries(props)) {
    if (value === null || value === undefined || value === false) continue;
    if (name.startsWith("on")) element.addEventListener(name.slice(2), value);
    else element.setAttribute(name, value === true ? "" : value);
  }
  element.append(...children.flat(2).filter((child) => child !== null && child !== undefined));
  return element;
}

/**
 * Makes an element's content what `children` are, changing only what differs, so that focus, selection and running
 * transitions survive a refresh. Children with `data-key` are told apart by it. Listeners of elements that stay are
 * the old ones: put them on a parent that is not filled again.
 */
export function fill(element, ...children) {
  const next = document.createElement(element.tagName);
  next.append(...children.flat(2).filter((child) => child !== null && child !== undefined));
  morphChildren(element, next);
}

function morphChildren(old, next) {
  const wanted = [...next.childNodes];
  wanted.forEach((child, place) => {
    const at = old.childNodes[place] ?? null;
    const match = alike(at, child) ? at : keyed(old, child);
    if (!match) {
      old.insertBefore(child, at);
      return;
    }
    if (match !== at) old.insertBefore(match, at);
    morph(match, child);
  });
  while (old.childNodes.length > wanted.length) old.lastChild.remove();
}

const keyOf = (node) => node?.dataset?.key;
const alike = (old, next) => old?.nodeName === next.nodeName && keyOf(old) === keyOf(next);
const keyed = (parent, child) => (keyOf(child) === undefined ? null
  : [...parent.children].find((other) => alike(other, child)) ?? null);

function morph(old, next) {
  if (old.nodeType === Node.TEXT_NODE) {
    if (old.data !== next.data) old.data = next.data;
    return;
  }
  for (const { name } of [...old.attributes]) if (!next.hasAttribute(name)) old.removeAttribute(name);
  for (const { name, value } of next.attributes) if (old.getAttribute(name) !== value) old.setAttribute(name, value);
  morphChildren(old, next);
}

/** Sets text, touching the page only when it changed. */
export function say(element, text) {
  if (element.textContent !== text) element.textContent = text;
}
