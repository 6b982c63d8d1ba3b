// The colours of css/base.css, for canvases.

let cache = new Map();
addEventListener("themechange", () => {
  cache = new Map();
});

/** A colour by its variable's name, without the dashes: color("c-prefill"). */
export function color(name) {
  if (!cache.has(name))
    cache.set(name, getComputedStyle(document.documentElement).getPropertyValue(`--${name}`).trim());
  return cache.get(name);
}

function channels(hex) {
  return [1, 3, 5].map((at) => parseInt(hex.slice(at, at + 2), 16));
}

/** What lies between two colours; share 0 is the first. */
export function between(first, second, share) {
  const key = `${first}|${second}|${share}`;
  if (!cache.has(key)) {
    const [from, to] = [channels(color(first)), channels(color(second))];
    cache.set(key, `rgb(${from.map((value, i) => Math.round(value + (to[i] - value) * share)).join(",")})`);
  }
  return cache.get(key);
}

/** A colour for text on something with so many holders. */
export function onHolders(number) {
  const share = number <= 0 ? 0 : (Math.min(9, number) - 1) / 8;
  const dark = document.documentElement.dataset.theme === "dark";
  if (number <= 0) return color("ink");
  return dark === share > 0.3 ? "#10122a" : "#ffffff";
}

/** The colour of something with so many holders: none, one, ... nine or more. */
export function holders(number) {
  if (number <= 0) return color("p-idle");
  return between("p-one", "p-many", (Math.min(9, number) - 1) / 8);
}
