// Small helpers for building the page. Text only ever enters as text, never as markup.

/** Make an element: h("button", {class: "x", onclick: f}, "label", child, ...). Nullish children are left out. */
export function h(tag, props = {}, ...children) {
  const element = document.createElement(tag);
  for (const [name, value] of Object.entries(props)) {
    if (value === null || value === undefined || value === false) continue;
    if (name.startsWith("on")) element.addEventListener(name.slice(2), value);
    else if (name === "class") element.className = value;
    else if (name === "value" || name === "checked") element[name] = value;
    else element.setAttribute(name, value === true ? "" : value);
  }
  element.append(...children.flat().filter((child) => child !== null && child !== undefined && child !== false));
  return element;
}

const SVG = "http://www.w3.org/2000/svg";

const ICONS = {
  plus: "M12 5v14M5 12h14",
  send: "M12 19V5M6 11l6-6 6 6",
  stop: "M8 8h8v8H8z",
  copy: "M9 9h10v11H9zM5 15V4h10",
  retry: "M4 12a8 8 0 1 0 2.5-5.8M4 4v4.5h4.5",
  edit: "M4 20h4L19 9l-4-4L4 16z",
  trash: "M5 7h14M10 7V4h4v3M7 7l1 13h8l1-13",
  sliders: "M4 8h10M18 8h2M4 16h2M10 16h10M16 6v4M8 14v4",
  forward: "M5 12h14M13 6l6 6-6 6",
  list: "M4 7h16M4 12h16M4 17h10",
  close: "M6 6l12 12M18 6 6 18",
  trace: "M4 18h4M8 12h8M14 6h6",
  pause: "M9 6v12M15 6v12",
  play: "M8 5.5v13l11-6.5z",
  more: "M5 11.5h.6v.8H5zM11.7 11.5h.6v.8h-.6zM18.4 11.5h.6v.8h-.6z",
  left: "M14 6l-6 6 6 6",
  right: "M10 6l6 6-6 6",
  branch: "M7 5v14M7 13c0-3 2-4 5-4h5M14 6l3 3-3 3",
  download: "M12 4v11M7 11l5 5 5-5M5 20h14",
  upload: "M12 16V5M7 9l5-5 5 5M5 20h14",
  tool: "M14.5 6.5a4 4 0 0 0-5 5L4 17l3 3 5.5-5.500a4 4 0 0 0 5-5L15 12l-3-3z",
  search: "M11 5a6 6 0 1 0 0 12 6 6 0 0 0 0-12M15.5 15.5 20 20",
  attach: "M19 11.500 12.500 18a4.500 4.500 0 0 1-6.400-6.400L13 4.800a3 3 0 0 1 4.200 4.200l-6.800 6.800a1.500 1.500 0 0 1-2.100-2.100L14.500 7.500",
  check: "M5 12.5 10 17.5 19 7",
  key: "M15 9a4 4 0 1 1-3.5 2L4 18.5V21h3v-2h2v-2h2l1.5-1.5",
};

/** One of the line icons, by name. */
export function icon(name) {
  const svg = document.createElementNS(SVG, "svg");
  svg.setAttribute("viewBox", "0 0 24 24");
  svg.setAttribute("class", "icon");
  svg.setAttribute("aria-hidden", "true");
  const path = document.createElementNS(SVG, "path");
  path.setAttribute("d", ICONS[name]);
  svg.append(path);
  return svg;
}

/** The stack of sheets: the product's sign. */
export function sign() {
  return document.querySelector(".brand svg").cloneNode(true);
}

/** Take everything out of `element` and put `children` in. */
export function fill(element, ...children) {
  element.replaceChildren(
    ...children.flat().filter((child) => child !== null && child !== undefined && child !== false),
  );
  return element;
}

/** Set an element's text only if it differs: spares the browser a layout. */
export function setText(element, text) {
  if (element.textContent !== text) element.textContent = text;
}

/** A group of buttons of which one is pressed. `options`: [[value, label], ...]. */
export function segments(options, current, onChange, label) {
  const group = h("div", { class: "segments", role: "group", "aria-label": label });
  const press = (value) => {
    for (const button of group.children)
      button.setAttribute("aria-pressed", String(button.dataset.value === String(value)));
  };
  for (const [value, text] of options) {
    const choose = () => {
      press(value);
      onChange(value);
    };
    group.append(h("button", { type: "button", "data-value": String(value), onclick: choose }, text));
  }
  press(current);
  group.press = press;
  return group;
}

/** Copy text; tells by the button's icon that it worked. */
export async function copy(text, button) {
  try {
    await navigator.clipboard.writeText(text);
  } catch {
    const area = h("textarea", { value: text, style: "position:fixed;opacity:0" }); // plain http on another host
    document.body.append(area);
    area.select();
    document.execCommand("copy");
    area.remove();
  }
  const before = button.firstChild;
  before.replaceWith(icon("check"));
  setTimeout(() => button.firstChild.replaceWith(before), 1200);
}

/** A button that shows nothing but an icon. `label` is what it does. */
export function iconButton(name, label, action, extra = "") {
  const button = h("button", { class: `icon-button ${extra}`.trim(), type: "button", title: label, "aria-label": label });
  button.append(icon(name));
  button.addEventListener("click", () => action(button));
  return button;
}

/** A button that opens a menu. `items()`: [[icon, label, action], ...], those that are false are left out. */
export function menuButton(label, items, extra = "") {
  const button = iconButton("more", label, () => openMenu(button, label, items().filter(Boolean)), extra);
  button.setAttribute("aria-haspopup", "menu");
  return button;
}

function openMenu(button, label, items) {
  const menu = h("div", { class: "menu", role: "menu", popover: "auto", "aria-label": label });
  const entries = items.map(([name, text, action]) =>
    h(
      "button",
      {
        type: "button",
        role: "menuitem",
        onclick: () => {
          menu.hidePopover();
          action();
        },
      },
      icon(name),
      text,
    ),
  );
  menu.append(...entries);
  menu.addEventListener("keydown", (event) => {
    const step = { ArrowDown: 1, ArrowUp: -1 }[event.key];
    if (!step) return;
    event.preventDefault();
    entries[(entries.indexOf(document.activeElement) + step + entries.length) % entries.length].focus();
  });
  menu.addEventListener("toggle", (event) => {
    if (event.newState !== "closed") return;
    menu.remove();
    button.setAttribute("aria-expanded", "false");
    if (document.activeElement === document.body) button.focus();
  });
  document.body.append(menu);
  menu.showPopover();
  button.setAttribute("aria-expanded", "true");
  const place = button.getBoundingClientRect();
  const { width, height } = menu.getBoundingClientRect();
  menu.style.left = `${Math.max(8, Math.min(place.left, innerWidth - width - 8))}px`;
  menu.style.top = `${place.bottom + 4 + height > innerHeight ? Math.max(8, place.top - 4 - height) : place.bottom + 4}px`;
  entries[0].focus();
}

/** Say something at the page's edge for a while, with one thing that can be done about it. */
export function toast(text, label, action) {
  document.querySelector(".toast")?.remove();
  const close = () => box.remove();
  const act = () => {
    close();
    action();
  };
  const button = label && h("button", { class: "button small", type: "button", onclick: act }, label);
  const box = h("div", { class: "toast", role: "status" }, h("span", {}, text), button, iconButton("close", "Close", close));
  document.body.append(box);
  let left = 12; // seconds, in which nobody points at it or has it in focus
  const timer = setInterval(() => {
    if (!box.isConnected) clearInterval(timer);
    else if (!box.matches(":hover, :focus-within") && --left <= 0) close();
  }, 1000);
}

const tip = h("div", { class: "tooltip", hidden: true });

/** Show the tooltip near the pointer; `text`'s first line is set in bold. Null hides it. */
export function tooltip(text, event) {
  if (!text) {
    tip.hidden = true;
    return;
  }
  if (!tip.isConnected) document.body.append(tip);
  const cut = text.indexOf("\n");
  fill(tip, h("b", {}, cut < 0 ? text : text.slice(0, cut)), cut < 0 ? "" : text.slice(cut));
  tip.hidden = false;
  const { width, height } = tip.getBoundingClientRect();
  const x = event.clientX + 14 + width > innerWidth ? event.clientX - 14 - width : event.clientX + 14;
  const y = event.clientY + 14 + height > innerHeight ? event.clientY - 14 - height : event.clientY + 14;
  tip.style.transform = `translate(${Math.max(4, x)}px, ${Math.max(4, y)}px)`;
}
