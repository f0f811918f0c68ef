"use strict";
// Sorts, filters and pages tables, and draws figures from the numbers beside them. Without it the words and the tables
// of the page stay as they are.
(() => {
  const PAGE = 25;
  const FILTERED_FROM = 12;
  const COLOURS = 10;
  const MARKERS = ["circle", "square", "triangle", "diamond", "cross", "plus", "down", "ring", "star"];
  const MOST_LABELS = 14;
  const MOST_NAMED = 60;
  // Pixels above a figure, for the name of its vertical axis.
  const TOP = 24;
  const BYTES = { B: 1, kB: 1e3, MB: 1e6, GB: 1e9, TB: 1e12 };
  const words = new Intl.Collator("en", { numeric: true, sensitivity: "base" });

  const create = (name, properties = {}, ...inside) => {
    const element = Object.assign(document.createElement(name), properties);
    element.append(...inside);
    return element;
  };
  const shape = (name, attributes = {}, ...inside) => {
    const element = document.createElementNS("http://www.w3.org/2000/svg", name);
    for (const [key, value] of Object.entries(attributes)) element.setAttribute(key, value);
    element.append(...inside);
    return element;
  };
  const clamp = (value, low, high) => Math.min(Math.max(value, low), high);

  // ---- Numbers as the program writes them: three digits.

  const number = (value, digits = 3) => {
    if (!Number.isFinite(value)) return "–";
    if (value === 0) return "0";
    const power = Math.floor(Math.log10(Math.abs(Number(value.toPrecision(digits)))));
    if (power < -4 || power >= 6) return value.toExponential(digits - 1);
    return value.toFixed(Math.max(digits - 1 - power, 0));
  };
  const short = (value) => String(Number(value.toPrecision(3)));
  const duration = (seconds, digits = 3) => {
    const [unit, factor] = [["s", 1], ["ms", 1e3], ["us", 1e6]].find(([, f]) => seconds * f >= 0.9995) ?? ["us", 1e6];
    return `${number(seconds * factor, digits)} ${unit}`;
  };
  const scaled = (value, units) => {
    const [unit, factor] = units.findLast(([, f]) => value >= f * 0.9995) ?? units[0];
    return `${short(value / factor)} ${unit}`;
  };
  const rate = (value) => scaled(value, [["bit/s", 1], ["kbit/s", 1e3], ["Mbit/s", 1e6], ["Gbit/s", 1e9]]);
  const FORMATS = {
    percent: (value) => `${short(100 * value)}%`,
    time: (value) => scaled(value, [["us", 1e-6], ["ms", 1e-3], ["s", 1]]),
    rate,
    bytes: (value) => scaled(value, Object.entries(BYTES)),
    plain: (value) => (Math.abs(value) >= 1e6 ? value.toExponential(1).replace("e+", "e") : short(value)),
    whole: (value) => Math.round(value).toLocaleString("en"),
  };

  // ---- Tables

  // The first line of a cell; the smaller second one explains it.
  const shown = (cell) => (cell.firstChild ? cell.firstChild.textContent.trim() : "");

  // NaN for what is no number: a dash, or nothing.
  const parsed = (text) => {
    if (text.endsWith("∞")) return text.startsWith("-") ? -Infinity : Infinity;
    const found = text.replaceAll(",", "").match(/^[<+]?(-?[\d.]+(?:e[-+]?\d+)?)\s*([kMGT]?B\b)?/);
    return found ? Number(found[1]) * (found[2] ? BYTES[found[2]] : 1) : NaN;
  };

  function sorted(table, rows, column, direction) {
    if (direction === "none") return rows;
    const numeric = !table.tHead.rows[0].cells[column].classList.contains("word");
    const keyed = rows.map((row) => {
      const cell = row.cells[column];
      const text = shown(cell);
      const key = cell.dataset.value ? Number(cell.dataset.value) : numeric ? parsed(text) : text;
      return { row, key, missing: numeric ? Number.isNaN(key) : key === "" };
    });
    const sign = direction === "ascending" ? 1 : -1;
    const compare = numeric ? (a, b) => a - b : words.compare;
    // What is missing comes last in both directions.
    keyed.sort((a, b) => a.missing - b.missing || (a.missing ? 0 : sign * compare(a.key, b.key)));
    return keyed.map((item) => item.row);
  }

  // First in rising order, then falling, then as it was.
  const NEXT = { none: "ascending", ascending: "descending", descending: "none" };

  function interactive(table) {
    const body = table.tBodies[0];
    const rows = [...body.rows];
    const heads = [...table.tHead.rows[0].cells];
    const noun = table.dataset.noun;
    const empty = create("tr", { hidden: true }, create("td", { className: "word", colSpan: heads.length }));
    let [order, matching, first] = [rows, rows, 0];
    const status = create("span", { className: "count" });
    status.setAttribute("role", "status");
    const move = (pages) => {
      first = clamp(first + pages * PAGE, 0, Math.max(0, matching.length - 1));
      show();
    };
    const back = create("button", { type: "button", onclick: () => move(-1) }, "Previous");
    const on = create("button", { type: "button", onclick: () => move(1) }, "Next");
    const pager = create("span", { className: "pager" }, back, on);

    function show() {
      body.append(...order, empty);
      const page = new Set(matching.slice(first, first + PAGE));
      rows.forEach((row) => (row.hidden = !page.has(row)));
      empty.hidden = matching.length > 0;
      const last = Math.min(first + PAGE, matching.length);
      const part = matching.length > PAGE ? `${first + 1}–${last} of ` : "";
      const of = matching.length < rows.length ? ` of ${rows.length}` : "";
      status.textContent = `${part}${matching.length}${of} ${noun}s`;
      pager.hidden = matching.length <= PAGE;
      back.disabled = first === 0;
      on.disabled = last >= matching.length;
    }

    heads.forEach((head, column) => {
      const button = create("button", { type: "button", className: "sort" }, ...head.childNodes);
      head.append(button);
      head.setAttribute("aria-sort", "none");
      button.addEventListener("click", () => {
        const direction = NEXT[head.getAttribute("aria-sort")];
        heads.forEach((other) => other.setAttribute("aria-sort", other === head ? direction : "none"));
        order = sorted(table, rows, column, direction);
        matching = order.filter((row) => matching.includes(row));
        first = 0;
        show();
      });
    });
    if (rows.length < FILTERED_FROM) return;
    const texts = new Map(rows.map((row) => [row, row.textContent.toLowerCase()]));
    const field = filterField(`${noun}s`, table.getAttribute("aria-label"), (wanted, text) => {
      matching = order.filter((row) => wanted.every((word) => texts.get(row).includes(word)));
      empty.cells[0].textContent = `No ${noun} matches '${text}'`;
      first = 0;
      show();
    });
    table.closest(".scroll").before(create("div", { className: "tools" }, field, status, pager));
    show();
  }

  function filterField(nouns, about, apply) {
    const field = create("input", { type: "search", autocomplete: "off", spellcheck: false });
    field.setAttribute("aria-label", `Filter ${nouns}: ${about}`);
    field.addEventListener("input", () => {
      apply(field.value.toLowerCase().split(/\s+/).filter(Boolean), field.value.trim());
    });
    return create("label", {}, `Filter ${nouns} `, field);
  }

  for (const table of document.querySelectorAll("table.sortable")) {
    if (table.tBodies[0].rows.length > 1) interactive(table);
  }

  for (const box of document.querySelectorAll(".scroll")) {
    const hint = create("p", { className: "hint", hidden: true }, "This table scrolls sideways →");
    box.after(hint);
    new ResizeObserver(() => (hint.hidden = box.scrollWidth <= box.clientWidth + 1)).observe(box);
  }

  for (const list of document.querySelectorAll(".layers")) {
    const layers = [...list.querySelectorAll(":scope > details")];
    if (layers.length < 2) continue;
    const texts = layers.map((layer) => layer.firstElementChild.textContent.toLowerCase());
    const status = create("span", { className: "count" }, `${layers.length} tensors`);
    status.setAttribute("role", "status");
    const field = filterField("tensors", list.getAttribute("aria-label"), (wanted, text) => {
      layers.forEach((layer, k) => (layer.hidden = !wanted.every((word) => texts[k].includes(word))));
      const left = layers.filter((layer) => !layer.hidden).length;
      status.textContent = left ? `${left} of ${layers.length} tensors` : `No tensor matches '${text}'`;
    });
    const tools = create("div", { className: "tools" }, field, status);
    for (const [name, open] of [["Open all", true], ["Close all", false]]) {
      tools.append(
        create("button", { type: "button", onclick: () => layers.forEach((layer) => (layer.open = open)) }, name),
      );
    }
    list.prepend(tools);
  }

  // ---- Charts. A name has the same colour and marker in every figure of the page.

  const looks = new Map();
  const FRONT = "best measured";
  function look(label) {
    if (label === FRONT) return { colour: "front", marker: null, dash: "" };
    if (!looks.has(label)) {
      const k = looks.size;
      // Lines without markers differ, too.
      const dash = ["", "6 3", "2 3"][Math.floor(k / COLOURS) % 3];
      looks.set(label, { colour: `k${k % COLOURS}`, marker: MARKERS[k % MARKERS.length], dash });
    }
    return looks.get(label);
  }

  const POLYGONS = {
    triangle: "0,-5 4.6,3.6 -4.6,3.6",
    down: "0,5 4.6,-3.6 -4.6,-3.6",
    diamond: "0,-5 5,0 0,5 -5,0",
    square: "-3.8,-3.8 3.8,-3.8 3.8,3.8 -3.8,3.8",
    star: "0,-6 1.5,-1.8 6,-1.8 2.4,1 3.7,5.2 0,2.7 -3.7,5.2 -2.4,1 -6,-1.8 -1.5,-1.8",
  };
  function marker(kind, x, y) {
    const at = { transform: `translate(${x} ${y})`, class: "marker" };
    if (POLYGONS[kind]) return shape("polygon", { ...at, points: POLYGONS[kind] });
    if (kind === "cross") return shape("path", { ...at, class: "marker open", d: "M-4,-4L4,4M-4,4L4,-4" });
    if (kind === "plus") return shape("path", { ...at, class: "marker open", d: "M0,-5V5M-5,0H5" });
    return shape("circle", { ...at, class: kind === "ring" ? "marker open" : "marker", r: 4 });
  }

  function axis(values, log, pixels, format, dense) {
    let [low, high] = [Math.min(...values), Math.max(...values)];
    if (!(low < high)) [low, high] = log ? [low / 2, high * 2] : [low - 1, high + 1];
    if (log && high < 3 * low) [low, high] = [Math.sqrt((low * high) / 3), Math.sqrt(low * high * 3)];
    const margin = 0.04;
    if (log) [low, high] = [low * (low / high) ** margin, high * (high / low) ** margin];
    else [low, high] = [low - margin * (high - low), high + margin * (high - low)];
    const [from, to] = log ? [Math.log(low), Math.log(high)] : [low, high];
    const place = (value) => (((log ? Math.log(value) : value) - from) / (to - from)) * pixels;
    return { place, ticks: ticks(low, high, log, pixels / dense, format).filter((t) => t >= low && t <= high) };
  }

  function ticks(low, high, log, most, format) {
    if (!log) {
      const raw = (high - low) / Math.max(1, most);
      const power = 10 ** Math.floor(Math.log10(raw));
      const step = Math.max(power * ([1, 2, 5, 10].find((m) => m * power >= raw) ?? 10), format === "whole" ? 1 : 0);
      const count = Math.floor(high / step) - Math.ceil(low / step) + 1;
      return Array.from({ length: count }, (_, k) => Number(((Math.ceil(low / step) + k) * step).toPrecision(12)));
    }
    const [first, last] = [Math.floor(Math.log10(low)), Math.ceil(Math.log10(high))];
    const thirds = format === "percent" ? [1, 3] : [1, 2, 5];
    // As many as there is room for, from the finest choice to one in several decades.
    for (const [inside, every] of [[[1, 1.5, 2, 3, 4, 5, 6, 8], 1], [thirds, 1], [[1], 1], [[1], 2], [[1], 4], [[1], 8]]) {
      const found = [];
      for (let k = first; k <= last; k += 1) if (k % every === 0) found.push(...inside.map((m) => m * 10 ** k));
      const there = found.filter((t) => t >= low && t <= high);
      if (there.length <= Math.max(2, most)) return there;
    }
    return [];
  }

  // Names beside the ends of curves: pushed apart until none overlaps another.
  function spread(labels, low, high, height) {
    labels.sort((a, b) => a.y - b.y);
    labels.forEach((label, k) => (label.at = Math.max(label.y, k ? labels[k - 1].at + height : low)));
    for (let k = labels.length - 1, most = high; k >= 0; k -= 1) {
      labels[k].at = Math.min(labels[k].at, most);
      most = labels[k].at - height;
    }
  }

  // Places along a curve, a few pixels from each other.
  function along(list) {
    return list.flatMap((p, k) => {
      const q = list[Math.max(0, k - 1)];
      const parts = Math.ceil(Math.hypot(p.px - q.px, p.py - q.py) / 6);
      return Array.from({ length: parts + 1 }, (_, j) => ({
        px: q.px + ((p.px - q.px) * j) / (parts || 1),
        py: q.py + ((p.py - q.py) * j) / (parts || 1),
      }));
    });
  }

  const cut = (text, most) =>
    text.length <= most ? text : `${text.slice(0, Math.ceil(most / 2) - 1)}…${text.slice(-Math.floor(most / 2))}`;

  class Plot {
    constructor(panel, hidden, title) {
      this.panel = panel;
      this.hidden = hidden;
      this.unfolded = false;
      this.tip = create("div", { className: "tip", hidden: true });
      this.box = create("div", { className: "plot", tabIndex: 0 });
      this.box.setAttribute("role", "group");
      this.box.setAttribute("aria-label", `${panel.title || title}: arrow keys read the points`);
      this.live = create("span", { className: "unseen" });
      this.live.setAttribute("role", "status");
      this.fold = create("button", { type: "button", className: "fold", hidden: true });
      this.fold.addEventListener("click", () => {
        this.unfolded = !this.unfolded;
        this.draw();
      });
      const heading = panel.title ? [create("p", { className: "panel-title" }, panel.title)] : [];
      this.element = create("div", { className: "panel" }, ...heading, this.box, this.live, this.fold);
      this.box.addEventListener("pointermove", (event) => this.point(event));
      this.box.addEventListener("pointerleave", () => this.leave());
      this.box.addEventListener("blur", () => this.leave());
      this.box.addEventListener("keydown", (event) => this.key(event));
    }

    draw() {
      const { panel } = this;
      const width = this.box.clientWidth;
      if (!width) return;
      const named = panel.rows.length > 0;
      const whole = !panel.log_x && panel.curves.every((curve) => curve.x.every(Number.isInteger));
      const unit = panel.x_label.startsWith("bytes") ? "bytes" : whole ? "whole" : "plain";
      const xFormat = FORMATS[panel.xFormat ?? unit];
      const yFormat = FORMATS[panel.yFormat ?? (panel.percent ? "percent" : "plain")];
      const visible = panel.curves.filter((curve) => !this.hidden.has(curve.label));
      const points = visible.map((curve) => curve.x.map((x, k) => ({ x, y: curve.y[k], k, curve })));
      const above = points.flat().filter((p) => p.y > panel.most).length;
      const inside = points.map((list) => list.filter((p) => this.unfolded || p.y <= panel.most));
      const every = inside.flat();
      this.fold.hidden = !above;
      const things = `${above} ${above === 1 ? "point" : "points"} that lose more than the whole gradient`;
      this.fold.textContent = this.unfolded ? `Hide ${things}` : `Show ${things}`;
      // A name for each, also of several curves; the front is in the legend.
      const names = [...new Set(visible.map((c) => c.label))].filter((label) => label !== FRONT);
      const beside = width >= 520 && !named && names.length <= MOST_LABELS;
      const right = beside ? 7.9 * Math.min(24, Math.max(0, ...names.map((label) => label.length))) + 26 : 14;
      const height = named ? 24 * panel.rows.length + 62 : Math.round(clamp(width * 0.54, 260, 350));
      const h = height - TOP - 42;
      if (!every.length) return this.box.replaceChildren(create("p", { className: "quiet" }, "Nothing to draw."));
      const lines = panel.lines.filter(([, y]) => y <= panel.most);
      const yFrom = [...every.map((p) => p.y), ...lines.map(([, y]) => y)];
      const ys = named
        ? { place: (y) => h - (y + 0.5) * (h / panel.rows.length), ticks: panel.rows.map((_, k) => k) }
        : axis(yFrom, panel.log_y, h, panel.percent ? "percent" : "", 28);
      const yNames = ys.ticks.map((t) => (named ? cut(panel.rows[t], 24) : yFormat(t)));
      const left = Math.max(54, 6.9 * Math.max(0, ...yNames.map((name) => name.length)) + 16);
      const w = width - left - right;
      const xs = axis([...every.map((p) => p.x), ...panel.marks.map(([, x]) => x)], panel.log_x, w, whole ? "whole" : "", 52);
      const X = (x) => left + xs.place(x);
      const Y = (y) => TOP + h - ys.place(y);
      const svg = shape("svg", { viewBox: `0 0 ${width} ${height}`, "aria-hidden": "true", focusable: "false" });
      const text = (x, y, content, attributes = {}) => svg.append(shape("text", { x, y, ...attributes }, content));
      ys.ticks.forEach((t, k) => {
        svg.append(shape("line", { x1: left, x2: left + w, y1: Y(t), y2: Y(t), class: "grid" }));
        text(left - 8, Y(t) + 4, yNames[k], { "text-anchor": "end" });
      });
      for (const t of xs.ticks) text(X(t), TOP + h + 18, xFormat(t), { "text-anchor": "middle" });
      text(left + w, TOP + h + 36, panel.x_label, { "text-anchor": "end", class: "axis" });
      // Places that a name must not cover.
      const taken = [];
      const cover = (x, y, wide) => {
        for (let k = 0; k <= wide; k += 6) taken.push({ px: x + k, py: y - 5 }, { px: x + k, py: y + 5 });
      };
      for (const [name, y] of lines) {
        svg.append(shape("line", { x1: left, x2: left + w, y1: Y(y), y2: Y(y), class: "reference" }));
        text(left + 4, Y(y) - 4, name, { class: "note" });
        cover(left + 4, Y(y) - 8, 6.2 * name.length);
      }
      panel.marks.forEach(([name, x], k) => {
        svg.append(shape("line", { x1: X(x), x2: X(x), y1: TOP, y2: TOP + h, class: "reference" }));
        // The words below the sliders say the same where there is no room.
        if (k && width < 520) return;
        const end = X(x) > left + w / 2;
        const at = { class: "note", "text-anchor": end ? "end" : "start" };
        const [from, y] = [X(x) + (end ? -4 : 4), TOP + 12 + 14 * (k % 6)];
        text(from, y, name, at);
        cover(end ? from - 6.2 * name.length : from, y - 4, 6.2 * name.length);
      });
      this.points = [];
      const labels = [];
      const order = visible.map((_, c) => c).sort((a, b) => (visible[b].label === FRONT) - (visible[a].label === FRONT));
      for (const c of order) {
        const curve = visible[c];
        const own = look(curve.label);
        const list = inside[c].map((p) => ({ ...p, px: X(p.x), py: Y(p.y) }));
        if (!list.length) continue;
        const group = shape("g", { class: `curve ${own.colour}`, "data-label": curve.label });
        const stepped = curve.label === FRONT || curve.form === "steps";
        if (curve.form !== "points") {
          const path = list.map((p, k) => (k ? (stepped ? `H${p.px}V${p.py}` : `L${p.px},${p.py}`) : `M${p.px},${p.py}`));
          group.append(shape("path", { d: path.join(""), class: "line", "stroke-dasharray": own.dash }));
        }
        const every = Math.ceil(list.length / 24);
        if (own.marker && curve.form !== "plain") {
          group.append(...list.filter((_, k) => k % every === 0).map((p) => marker(own.marker, p.px, p.py)));
        }
        svg.append(group);
        const last = list.at(-1);
        if (beside && names.includes(curve.label) && !labels.some((one) => one.curve.label === curve.label)) {
          labels.push({ ...last, y: last.py, colour: own.colour });
        }
        const corners = list.flatMap((p, k) => (k && stepped ? [{ px: p.px, py: list[k - 1].py }, p] : [p]));
        taken.push(...(curve.form === "points" ? list : along(corners)));
        // What can be pointed at: the front's points are those of other curves.
        if (curve.label !== FRONT) this.points.push(list);
      }
      // A name is beside, above or below the end of its curve if nothing else is there, otherwise at the edge with a
      // line to it.
      const near = labels.filter((label) => {
        const wide = 7.2 * Math.min(24, label.curve.label.length);
        const { px, py } = label;
        const places = [[px + 9, py]];
        // Lines that end together are told apart at the edge.
        if (label.curve.form !== "plain") places.push([px - wide / 2, py - 13], [px - wide / 2, py + 14]);
        const free = places.find(
          ([x, y]) =>
            x > left && x + wide < left + w && y > TOP + 4 && y < TOP + h - 4 &&
            taken.every((p) => p.px < x - 2 || p.px > x + wide || Math.abs(p.py - y) > 9),
        );
        if (!free) return false;
        const [x, y] = free;
        text(x, y + 4, cut(label.curve.label, 24), { class: `name ${label.colour}` });
        cover(x, y, wide);
        return true;
      });
      labels.splice(0, labels.length, ...labels.filter((label) => !near.includes(label)));
      spread(labels, TOP, TOP + h, 14);
      for (const { px, py, at, colour, curve } of labels) {
        const start = left + w + 14;
        svg.append(
          shape("path", { d: `M${px + 6},${py}L${start - 2},${at}`, class: `leader ${colour}` }),
          shape("text", { x: start, y: at + 4, class: `name ${colour}` }, cut(curve.label, 24)),
        );
      }
      if (panel.y_label) text(left, 12, panel.y_label, { class: "axis" });
      this.ring = shape("circle", { r: 7, class: "ring", visibility: "hidden" });
      svg.append(this.ring);
      this.width = width;
      this.box.replaceChildren(svg, this.tip);
      this.formats = [xFormat, named ? (y) => panel.rows[y] : yFormat];
    }

    point(event) {
      const box = this.box.getBoundingClientRect();
      const zoom = this.width / box.width;
      const [x, y] = [(event.clientX - box.left) * zoom, (event.clientY - box.top) * zoom];
      let [best, found] = [48 ** 2, null];
      (this.points ?? []).forEach((list, c) =>
        list.forEach((p, k) => {
          const away = (p.px - x) ** 2 + (p.py - y) ** 2;
          if (away < best) [best, found] = [away, [c, k]];
        }),
      );
      if (found) this.show(...found);
      else this.leave();
    }

    key(event) {
      const step = { ArrowLeft: [0, -1], ArrowRight: [0, 1], ArrowUp: [-1, 0], ArrowDown: [1, 0] }[event.key];
      if (event.key === "Escape") this.leave();
      if (!step || !this.points?.length) return;
      event.preventDefault();
      const [c, k] = this.at ?? [0, -step[1]];
      const next = clamp(c + step[0], 0, this.points.length - 1);
      this.show(next, clamp(k + step[1], 0, this.points[next].length - 1));
      this.live.textContent = this.tip.textContent;
    }

    show(c, k) {
      const p = this.points[c][k];
      const [xFormat, yFormat] = this.formats;
      const { panel } = this;
      this.at = [c, k];
      const value = panel.y_label ? `${yFormat(p.y)} ${panel.y_label}` : yFormat(p.y);
      this.tip.replaceChildren(
        create("strong", {}, p.curve.names[p.k] ?? p.curve.label),
        create("span", {}, `${panel.x_label === "bits per value" ? number(p.x) : xFormat(p.x)} ${panel.x_label}; ${value}`),
      );
      this.tip.hidden = false;
      const zoom = this.box.clientWidth / this.width;
      const most = this.box.clientWidth - this.tip.offsetWidth - 4;
      this.tip.style.left = `${clamp(p.px * zoom - this.tip.offsetWidth / 2, 4, Math.max(4, most))}px`;
      const over = p.py * zoom - this.tip.offsetHeight - 14;
      this.tip.style.top = `${over > 0 ? over : p.py * zoom + 14}px`;
      for (const [name, at] of [["cx", p.px], ["cy", p.py], ["visibility", "visible"]]) this.ring.setAttribute(name, at);
    }

    leave() {
      this.at = null;
      this.tip.hidden = true;
      this.ring?.setAttribute("visibility", "hidden");
    }
  }

  function legend(labels, marked, hidden, redraw) {
    return labels.map((label) => {
      const own = look(label);
      const sample = shape("svg", { viewBox: "0 0 26 12", width: 26, height: 12, class: `curve ${own.colour}` });
      sample.setAttribute("aria-hidden", "true");
      sample.append(shape("path", { d: "M1,6H25", class: "line", "stroke-dasharray": own.dash }));
      if (own.marker && marked.has(label)) sample.append(marker(own.marker, 13, 6));
      const button = create("button", { type: "button" }, sample, label);
      button.setAttribute("aria-pressed", "true");
      button.addEventListener("click", () => {
        const off = !hidden.delete(label);
        if (off) hidden.add(label);
        button.setAttribute("aria-pressed", String(!off));
        redraw();
      });
      return button;
    });
  }

  function chart(figure, data) {
    const hidden = new Set();
    const title = figure.getAttribute("aria-label");
    const plots = data.panels.map((panel) => (panel.bars ? bars(panel) : new Plot(panel, hidden, title)));
    const curves = data.panels.filter((p) => !p.bars && !p.rows.length).flatMap((p) => p.curves);
    const labels = [...new Set(curves.map((c) => c.label))];
    const marked = new Set(curves.filter((c) => c.form !== "plain").map((c) => c.label));
    const redraw = () => plots.forEach((plot) => plot.draw());
    const list = create("div", { className: "legend" }, ...(labels.length > 1 ? legend(labels, marked, hidden, redraw) : []));
    const grid = create("div", { className: "panels" }, ...plots.map((plot) => plot.element));
    grid.classList.toggle("single", data.columns === 1 || plots.length === 1);
    figure.append(grid, list);
    // Also draws it the first time, and when a folded part is opened.
    let width = 0;
    new ResizeObserver(() => {
      if (grid.clientWidth !== width) redraw();
      width = grid.clientWidth;
    }).observe(grid);
    return { plots, redraw };
  }

  function bars(panel) {
    const rows = panel.curves.flatMap((curve) => curve.x.map((name, k) => ({ name, curve, k, value: curve.y[k] })));
    const most = Math.max(...rows.map((row) => row.curve.high[row.k] ?? row.value), ...panel.lines.map(([, y]) => y));
    const list = create("div", { className: "bars" });
    for (const { name, curve, k, value } of rows) {
      const svg = shape("svg", { viewBox: "0 0 100 10", preserveAspectRatio: "none", "aria-hidden": "true" });
      const x = (v) => (100 * v) / most;
      svg.append(shape("rect", { x: 0, y: 1, width: x(value), height: 8, class: look(curve.label).colour }));
      if (curve.low.length) svg.append(shape("rect", { x: x(curve.low[k]), y: 4.5, width: x(curve.high[k] - curve.low[k]), height: 1, class: "span" }));
      for (const [, y] of panel.lines) svg.append(shape("rect", { x: x(y), y: 0, width: 0.4, height: 10, class: "span" }));
      const label = panel.curves.length > 1 ? `${name}, ${curve.label}` : name;
      list.append(create("span", { className: "bar-name", title: label }, label), svg, create("span", {}, short(value)));
    }
    const notes = panel.lines.map(([name, y]) => `${name}: ${short(y)}`);
    list.append(create("span", { className: "quiet wide" }, [panel.y_label, ...notes].filter(Boolean).join("; ")));
    return { element: list, draw: () => {} };
  }

  // ---- Errors of every tensor with every configuration: dark is worse.

  function heat(figure, data) {
    const canvas = create("canvas", {});
    const said = create("p", { className: "quiet" }, "Point at a cell for its name and error.");
    said.setAttribute("role", "status");
    const known = data.values.flat().filter((v) => v > 0);
    const [low, high] = [Math.log(Math.min(...known)), Math.log(Math.max(...known) * 1.0001)];
    const box = create("div", { className: "heat" }, canvas);
    figure.append(create("p", { className: "scale" }, `${FORMATS.percent(Math.exp(low))} `, create("i", {}), ` ${FORMATS.percent(Math.exp(high))}`), box, said);
    const [rows, columns] = [data.rows.length, data.columns.length];
    const [rowNames, columnNames] = [data.rows, data.columns].map((names) => names.map((name) => cut(name, 24)));
    // Names of rows and columns, where there is room; pixels that they take on the left and below.
    let [left, below] = [0, 0];
    const wide = (names) => Math.ceil(6.6 * Math.max(...names.map((name) => name.length))) + 8;
    function draw() {
      const ratio = devicePixelRatio || 1;
      const w = box.clientWidth;
      if (!w) return;
      const named = rows <= MOST_NAMED;
      left = named ? Math.min(wide(rowNames), w / 3) : 0;
      below = (w - left) / columns >= 13 ? wide(columnNames) : 0;
      const h = clamp(rows * 14, 28, named ? 14 * MOST_NAMED : 560);
      Object.assign(canvas, { width: w * ratio, height: (h + below) * ratio });
      canvas.style.height = `${h + below}px`;
      const context = canvas.getContext("2d");
      const style = getComputedStyle(document.documentElement);
      context.scale(ratio, ratio);
      const edge = (k) => Math.round(left + (k * (w - left)) / columns);
      const row = (t) => Math.round((t * h) / rows);
      context.fillStyle = style.getPropertyValue("--line");
      context.fillRect(left, 0, w - left, h);
      data.values.forEach((values, t) =>
        values.forEach((value, c) => {
          if (!(value > 0)) return;
          const part = (Math.log(value) - low) / (high - low || 1);
          context.fillStyle = `hsl(205 65% ${92 - 70 * part}%)`;
          context.fillRect(edge(c), row(t), edge(c + 1) - edge(c) - 1, row(t + 1) - row(t) - (rows > 60 ? 0 : 1));
        }),
      );
      context.font = `11px ${getComputedStyle(box).fontFamily}`;
      context.fillStyle = style.getPropertyValue("--muted");
      context.textAlign = "right";
      context.textBaseline = "middle";
      if (named) rowNames.forEach((name, t) => context.fillText(name, left - 6, (row(t) + row(t + 1)) / 2, left - 6));
      for (let c = 0; below && c < columns; c += 1) {
        context.save();
        context.translate((edge(c) + edge(c + 1)) / 2, h + 5);
        context.rotate(-Math.PI / 2);
        context.fillText(columnNames[c], 0, 0);
        context.restore();
      }
    }
    canvas.addEventListener("pointermove", (event) => {
      const area = canvas.getBoundingClientRect();
      const place = (at, size, count) => clamp(Math.floor((at / size) * count), 0, count - 1);
      const c = place(event.clientX - area.left - left, area.width - left, columns);
      const t = place(event.clientY - area.top, area.height - below, rows);
      const value = data.values[t][c];
      said.textContent = `${data.rows[t]}, ${data.columns[c]}: ${value === null ? "not measured" : `loses ${FORMATS.percent(value)}`}`;
    });
    matchMedia("(prefers-color-scheme: dark)").addEventListener("change", draw);
    new ResizeObserver(draw).observe(box);
  }

  // ---- Network: the arithmetic of gtrace/costs.py, whose numbers a test compares with these.

  const EXCHANGES = {
    allreduce: (ranks) => ({ messages: 2 * (ranks - 1), sent: (2 * (ranks - 1)) / ranks, coded: 0 }),
    allgather: (ranks) => ({ messages: ranks - 1, sent: ranks - 1, coded: 1 + ranks }),
    "two-shot": (ranks) => ({ messages: 2 * (ranks - 1), sent: (2 * (ranks - 1)) / ranks, coded: 3 + 1 / ranks }),
  };

  function stepSeconds(model, held, exchange, net) {
    const { messages, sent, coded } = EXCHANGES[exchange](net.ranks);
    const backward = model.backward * net.step;
    let [remaining, arrival] = [0, backward];
    for (let k = held.length - 1; k >= 0; k -= 1) {
      remaining += messages * model.latency + (held[k] * sent) / net.bandwidth;
      arrival = Math.max(arrival, model.ready[k] * backward + remaining);
    }
    return net.step + arrival - backward + (model.rate ? (coded * model.elements) / model.rate : 0);
  }

  const plain = (model, bits, net) =>
    stepSeconds(model, model.sizes.map((n) => n * bits), "allreduce", net);
  const coded = (model, held, net) =>
    Math.min(stepSeconds(model, held, "allgather", net), stepSeconds(model, held, "two-shot", net));

  function network(figure, model) {
    const [LEAST, MOST] = [1e8, 4e11];
    const rates = Array.from({ length: 121 }, (_, k) => LEAST * (MOST / LEAST) ** (k / 120));
    const net = { bandwidth: model.bandwidth, ranks: model.ranks, step: model.step };
    const ranks = [...new Set([2, 4, 8, 16, 32, 64, 128, 256, 512, 1024, model.ranks])].sort((a, b) => a - b);
    const logarithmic = (low, high) => [(v) => low * (high / low) ** (v / 1000), (x) => (1000 * Math.log(x / low)) / Math.log(high / low)];
    const controls = create("div", { className: "controls" });
    function slider(name, key, most, [value, place], format) {
      const range = create("input", { type: "range", min: 0, max: most, step: 1, value: Math.round(place(net[key])) });
      const output = create("output", {}, format(net[key]));
      range.setAttribute("aria-valuetext", format(net[key]));
      range.addEventListener("input", () => {
        net[key] = value(Number(range.value));
        output.textContent = format(net[key]);
        range.setAttribute("aria-valuetext", output.textContent);
        update();
      });
      controls.append(create("label", {}, create("span", {}, name), range, output));
    }
    slider("Link speed", "bandwidth", 1000, logarithmic(LEAST, MOST), rate);
    slider("Ranks", "ranks", ranks.length - 1, [(k) => ranks[k], (n) => ranks.indexOf(n)], String);
    slider("Step without network", "step", 1000, logarithmic(1e-3, 100), (seconds) => duration(seconds));
    const said = create("p", { className: "said" });
    said.setAttribute("role", "status");
    figure.append(controls, said);

    const timed = () => [
      ["float32", (at) => plain(model, 32, at)],
      ["bf16", (at) => plain(model, 16, at)],
      ...model.drawn.map((spec) => [spec, (at) => coded(model, model.codecs[spec], at)]),
    ];
    const pays = (seconds, bandwidth) => {
      const at = { ...net, bandwidth };
      return seconds(at) < (1 - model.worthwhile) * plain(model, 16, at);
    };
    // The fastest link on which a codec still makes steps shorter than bf16 does; null for none, Infinity for all.
    function crossover(seconds) {
      const last = rates.findLastIndex((bandwidth) => pays(seconds, bandwidth));
      if (last < 0) return null;
      if (last === rates.length - 1) return Infinity;
      let [low, high] = [rates[last], rates[last + 1]];
      for (let k = 0; k < 20; k += 1) {
        const middle = Math.sqrt(low * high);
        if (pays(seconds, middle)) low = middle;
        else high = middle;
      }
      return low;
    }
    const panel = {
      curves: [], title: "", x_label: "link speed", y_label: "a step", log_x: true, log_y: true, lines: [], marks: [],
      most: Infinity, rows: [], xFormat: "rate", yFormat: "time",
    };
    let drawing = null;

    function update() {
      const lines = timed();
      const codecs = lines.slice(2).map(([spec, seconds]) => [spec, seconds, crossover(seconds)]);
      panel.curves = lines.map(([label, seconds]) => ({
        label, x: rates, y: rates.map((bandwidth) => seconds({ ...net, bandwidth })), form: "plain", names: [],
      }));
      const crossing = codecs.filter(([, , at]) => at !== null && at < Infinity);
      panel.marks = [["your link", net.bandwidth], ...crossing.map(([spec, , at]) => [`${cut(spec, 24)} pays below ${rate(at)}`, at])];
      const reference = plain(model, 16, net);
      const parts = lines.map(([label, seconds]) => `${label} ${duration(seconds(net), 4)}`);
      const words = codecs.map(([spec, , at]) => {
        if (at === null) return `${spec} saves less than ${100 * model.worthwhile}% over bf16 at any speed.`;
        return at === Infinity ? `${spec} pays at every speed shown.` : `${spec} pays below ${rate(at)}.`;
      });
      said.textContent = `A step on ${net.ranks} ranks at ${rate(net.bandwidth)}: ${parts.join(", ")}. ${words.join(" ")}`;
      for (const row of document.querySelectorAll(`table[data-network="${figure.dataset.network}"] tbody tr`)) {
        const name = row.cells[0] && shown(row.cells[0]);
        const held = model.codecs[name];
        const bits = name === "float32" ? 32 : /^(bf16|fp16)(:|$)/.test(name) ? 16 : 0;
        if (!held && !bits) continue;
        const seconds = bits ? plain(model, bits, net) : coded(model, held, net);
        const [step, over] = [row.cells[row.cells.length - 2], row.cells[row.cells.length - 1]];
        step.dataset.value = seconds;
        step.textContent = duration(seconds, 4);
        over.dataset.value = reference / seconds;
        over.textContent = `${number(reference / seconds, 4)}x`;
      }
      for (const place of document.querySelectorAll(`[data-link="${figure.dataset.network}"]`)) {
        place.textContent = `${net.ranks} ranks at ${rate(net.bandwidth)}, ${duration(net.step)} a step`;
      }
      drawing?.redraw();
    }
    update();
    drawing = chart(figure, { panels: [panel], columns: 1 });
  }

  const KINDS = { chart, heat, network };
  const figures = [...document.querySelectorAll("script.data")].map((script) => {
    const data = JSON.parse(script.textContent);
    // Names get their looks in the order of the page, also in figures that are folded.
    for (const panel of data.panels ?? []) panel.curves.forEach((curve) => look(curve.label));
    return [script, data];
  });
  for (const [script, data] of figures) KINDS[script.dataset.kind](script.parentElement, data);

  // ---- The index marks the section that is being read.

  const links = new Map([...document.querySelectorAll("nav a")].map((link) => [link.hash.slice(1), link]));
  const sections = [...links.keys()].map((id) => document.getElementById(id));
  const mark = () => {
    const end = innerHeight + scrollY >= document.documentElement.scrollHeight - 2;
    const read = end ? sections.at(-1) : sections.findLast((section) => section.getBoundingClientRect().top < 140);
    for (const [id, link] of links) {
      if (id === (read ?? sections[0]).id) link.setAttribute("aria-current", "true");
      else link.removeAttribute("aria-current");
    }
  };
  if (sections.length) {
    addEventListener("scroll", mark, { passive: true });
    mark();
  }
})();
