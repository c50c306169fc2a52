// The gallery's pictures, drawn in the page: pointing at a query shows the keys that it attends to.

function listed(ranges) {
  const text = ranges.map(([start, stop]) => (stop - start > 1 ? `${start}–${stop - 1}` : `${start}`));
  return text.length > 14 ? `${text.slice(0, 14).join(", ")}, …` : text.join(", ");
}

function describe(ranges, query) {
  const count = ranges.reduce((sum, [start, stop]) => sum + stop - start, 0);
  if (!count) return `Query ${query} attends to no key.`;
  return `Query ${query} attends to ${count} ${count > 1 ? "keys" : "key"}: ${listed(ranges)}.`;
}

function patternView(view) {
  const rows = JSON.parse(view.dataset.ranges);
  const keys = Number(view.dataset.keys);
  const canvas = document.createElement("canvas");
  const text = document.createElement("p");
  const title = view.dataset.title;
  const hint = `${title ? `${title}: point` : "Point"} at a row, or use the arrow keys.`;
  let chosen = -1;

  function draw() {
    const style = getComputedStyle(document.documentElement);
    const color = (name) => style.getPropertyValue(`--pst-color-${name}`);
    const cell = Math.max(1, Math.floor((canvas.clientWidth * devicePixelRatio) / keys));
    canvas.width = cell * keys;
    canvas.height = cell * rows.length;
    const context = canvas.getContext("2d");
    const fill = (name, x, y, width, height) => {
      context.fillStyle = color(name);
      context.fillRect(x * cell, y * cell, width * cell, height * cell);
    };
    fill("background", 0, 0, keys, rows.length);
    if (chosen >= 0) {
      rows[chosen].forEach(([start, stop]) => fill("surface", start, 0, stop - start, rows.length));
      fill("border", 0, chosen, keys, 1);
    }
    rows.forEach((ranges, query) => {
      const name = query === chosen ? "secondary" : "primary";
      ranges.forEach(([start, stop]) => fill(name, start, query, stop - start, 1));
    });
  }

  function choose(query) {
    chosen = query < 0 ? -1 : Math.min(query, rows.length - 1);
    text.textContent = chosen < 0 ? hint : describe(rows[chosen], chosen);
    draw();
  }

  canvas.tabIndex = 0;
  canvas.setAttribute("role", "img");
  canvas.setAttribute("aria-label", "Allowed keys of each query");
  text.setAttribute("aria-live", "polite");
  view.append(canvas, text);
  canvas.addEventListener("pointermove", (event) => choose(Math.floor((event.offsetY / canvas.clientHeight) * rows.length)));
  canvas.addEventListener("pointerleave", () => choose(-1));
  canvas.addEventListener("keydown", (event) => {
    const step = { ArrowDown: 1, ArrowUp: -1 }[event.key];
    if (!step) return;
    event.preventDefault();
    choose(Math.max(0, chosen + step));
  });
  new ResizeObserver(draw).observe(canvas);
  new MutationObserver(draw).observe(document.documentElement, { attributeFilter: ["data-theme"] });
  choose(-1);
}

document.addEventListener("DOMContentLoaded", () => {
  const views = [...document.querySelectorAll(".pattern-view")];
  if (!views.length) return;
  const figure = views[0].parentElement.querySelector("figure");
  const together = document.createElement("div");
  together.className = "pattern-views";
  together.append(...views);
  figure.querySelector("a.image-reference, img").replaceWith(together);
  views.forEach(patternView);
});
