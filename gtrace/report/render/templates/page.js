"use strict";
// Sorting and filtering of the page's tables. Without it the page says the same and stands still.
(() => {
  const FILTERED_FROM = 12;
  const UNITS = { B: 1, kB: 1e3, MB: 1e6, GB: 1e9, TB: 1e12 };
  const words = new Intl.Collator("en", { numeric: true, sensitivity: "base" });

  const create = (name, properties, ...inside) => {
    const element = Object.assign(document.createElement(name), properties);
    element.append(...inside);
    return element;
  };

  // The first line of a cell; the smaller second one explains it.
  const shown = (cell) => (cell.firstChild ? cell.firstChild.textContent.trim() : "");

  // NaN for what is no number: a dash, or nothing.
  const number = (text) => {
    if (text.endsWith("∞")) return text.startsWith("-") ? -Infinity : Infinity;
    const found = text.replaceAll(",", "").match(/^[<+]?(-?[\d.]+(?:e[-+]?\d+)?)\s*([kMGT]?B)?/);
    return found ? Number(found[1]) * (found[2] ? UNITS[found[2]] : 1) : NaN;
  };

  const ascending = (numeric) => (a, b) => (numeric ? a - b : words.compare(a, b));

  function sort(table, rows, column, direction) {
    const heads = [...table.tHead.rows[0].cells];
    heads.forEach((head, k) => head.setAttribute("aria-sort", k === column ? direction : "none"));
    if (direction === "none") return table.tBodies[0].append(...rows);
    const numeric = !heads[column].classList.contains("word");
    const keyed = rows.map((row) => {
      const text = shown(row.cells[column]);
      const key = numeric ? number(text) : text;
      return { row, key, missing: numeric ? Number.isNaN(key) : key === "" };
    });
    const compare = ascending(numeric);
    const sign = direction === "ascending" ? 1 : -1;
    // What is missing comes last in both directions.
    keyed.sort((a, b) => a.missing - b.missing || (a.missing ? 0 : sign * compare(a.key, b.key)));
    table.tBodies[0].append(...keyed.map((item) => item.row));
  }

  // First in rising order, then falling, then as it was.
  const NEXT = { none: "ascending", ascending: "descending", descending: "none" };

  function makeSortable(table, rows) {
    [...table.tHead.rows[0].cells].forEach((head, column) => {
      const button = create("button", { type: "button", className: "sort" }, ...head.childNodes);
      head.append(button);
      head.setAttribute("aria-sort", "none");
      button.addEventListener("click", () => sort(table, rows, column, NEXT[head.getAttribute("aria-sort")]));
    });
  }

  function filter(items, noun, about, textOf) {
    const texts = items.map((item) => textOf(item).toLowerCase());
    const status = create("span", { className: "count" }, `${items.length} ${noun}`);
    status.setAttribute("role", "status");
    status.setAttribute("aria-live", "polite");
    const field = create("input", { type: "search", autocomplete: "off", spellcheck: false });
    field.setAttribute("aria-label", `Filter ${noun}: ${about}`);
    field.addEventListener("input", () => {
      const wanted = field.value.toLowerCase().split(/\s+/).filter(Boolean);
      let left = 0;
      items.forEach((item, k) => {
        item.hidden = !wanted.every((word) => texts[k].includes(word));
        left += !item.hidden;
      });
      status.textContent = wanted.length ? `${left} of ${items.length} ${noun}` : `${items.length} ${noun}`;
    });
    return create("div", { className: "tools" }, create("label", {}, `Filter ${noun} `, field), status);
  }

  for (const table of document.querySelectorAll("table.sortable")) {
    const rows = [...table.tBodies[0].rows];
    if (rows.length < 2) continue;
    makeSortable(table, rows);
    if (rows.length < FILTERED_FROM) continue;
    table.closest(".scroll").before(filter(rows, "rows", table.getAttribute("aria-label"), (row) => row.textContent));
  }

  for (const list of document.querySelectorAll(".layers")) {
    const layers = [...list.querySelectorAll(":scope > details")];
    if (layers.length < 2) continue;
    const tools = filter(layers, "layers", list.getAttribute("aria-label"), (layer) => layer.firstElementChild.textContent);
    for (const [name, open] of [["Open all", true], ["Close all", false]]) {
      const button = create("button", { type: "button" }, name);
      button.addEventListener("click", () => layers.forEach((layer) => (layer.open = open)));
      tools.append(button);
    }
    list.prepend(tools);
  }

  // On paper nothing can be opened.
  let closed = [];
  addEventListener("beforeprint", () => {
    closed = [...document.querySelectorAll("details:not([open])")];
    closed.forEach((item) => (item.open = true));
  });
  addEventListener("afterprint", () => closed.forEach((item) => (item.open = false)));
})();
