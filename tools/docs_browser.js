// Faults of the page that is shown, as texts; tools/docs_test.py runs this in each page at each width and theme.
() => {
  const found = [];
  const width = document.documentElement.clientWidth;
  const name = (e) => `<${e.tagName.toLowerCase()}> ${(e.textContent || e.alt || "").trim().slice(0, 40)}`;
  const page = (e) => e.matches(".bd-article-container");  // the theme lets the whole article scroll
  const scrolls = (e) => e && !page(e) && (/auto|scroll/.test(getComputedStyle(e).overflowX) || scrolls(e.parentElement));
  const shown = (e) => e.getClientRects().length && getComputedStyle(e).visibility !== "hidden";

  if (document.documentElement.scrollWidth > width + 1) found.push(`the page is ${document.documentElement.scrollWidth} pixels wide`);

  const blocks = [...document.querySelectorAll(
    "article :is(h1, h2, h3, h4, p, li, dt, dd, pre, img, canvas, table, th, td, figcaption), .bd-header :is(a, button), .twins a",
  )].filter(shown);
  for (const e of blocks) {
    const box = e.getBoundingClientRect();
    if ((box.right > width + 1 || box.left < -1) && !scrolls(e)) found.push(`${name(e)}: cut off at ${Math.round(box.right)}`);
    if (getComputedStyle(e).overflowX === "hidden" && e.scrollWidth > e.clientWidth + 1) found.push(`${name(e)}: text is hidden`);
    if (e.tagName === "PRE" && width > 1000 && e.scrollWidth > e.clientWidth + 1) found.push(`${name(e)}: a line is cut off`);
    if (e.tagName === "IMG" && e.complete && !e.naturalWidth) found.push(`${e.src}: no picture`);
  }

  for (const e of [...document.querySelectorAll("article code")].filter(shown)) {
    if (e.getBoundingClientRect().right > width + 1 && !scrolls(e)) found.push(`${name(e)}: cut off`);
  }

  // Tables fit; those of four columns and more may scroll where the screen is narrow.
  for (const e of document.querySelectorAll(".pst-scrollable-table-container")) {
    const columns = e.querySelector("tr").cells.length;
    if (e.scrollWidth > e.clientWidth + 1 && columns < 4) found.push(`${name(e)}: the table scrolls`);
  }

  // Blocks without blocks inside may touch, not overlap.
  const leaves = blocks.filter((e) => !blocks.some((other) => other !== e && e.contains(other)));
  const boxes = leaves.map((e) => [e, e.getBoundingClientRect()]).sort((a, b) => a[1].top - b[1].top);
  boxes.forEach(([e, box], n) => {
    for (let m = n + 1; m < boxes.length && boxes[m][1].top < box.bottom - 3; m++) {
      const [other, its] = boxes[m];
      const apart = Math.min(box.right, its.right) - Math.max(box.left, its.left) <= 3;
      const fixed = [e, other].some((x) => x.closest(".bd-header")) && !(e.closest(".bd-header") && other.closest(".bd-header"));
      if (!apart && !fixed && !(scrolls(e) || scrolls(other))) found.push(`${name(e)} overlaps ${name(other)}`);
    }
  });

  // Contrast of text with what is behind it: at least 4.5, as in WCAG 2 AA; colors with an alpha are left out.
  const numbers = (color) => (color.match(/[\d.]+/g) || []).map(Number);
  const luminance = (color) => {
    const [r, g, b] = numbers(color).map((x) => (x / 255 <= 0.03928 ? x / 255 / 12.92 : ((x / 255 + 0.055) / 1.055) ** 2.4));
    return 0.2126 * r + 0.7152 * g + 0.0722 * b;
  };
  const behind = (e) => {
    for (; e; e = e.parentElement) {
      const color = numbers(getComputedStyle(e).backgroundColor);
      if (color.length === 3) return getComputedStyle(e).backgroundColor;
      if (color[3] > 0) return null;
    }
    return "rgb(255, 255, 255)";
  };
  const seen = new Set();
  for (const e of document.querySelectorAll("article :is(h1, h2, p, li, td, th, a, code)")) {
    const color = getComputedStyle(e).color;
    const back = behind(e);
    if (!shown(e) || !e.textContent.trim() || !back || numbers(color).length !== 3 || seen.has(color + back)) continue;
    seen.add(color + back);
    const [low, high] = [luminance(color), luminance(back)].sort((a, b) => a - b);
    const ratio = (high + 0.05) / (low + 0.05);
    if (ratio < 4.5) found.push(`${name(e)}: contrast ${ratio.toFixed(1)}`);
  }
  return found;
}
