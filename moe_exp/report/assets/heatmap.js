// Two heatmaps of expert load: all layers and experts at one time, and the experts of one layer over time.
"use strict";
Report.load = experts => {
  const bytes = Uint8Array.from(atob(experts.load), character => character.charCodeAt(0));
  return new Uint16Array(bytes.buffer); // little-endian, like all machines that run browsers
};

// Maps a load relative to the fair share to a color: 0 cold, 1 even, 4 and above hot (logarithmic above 1); below 1%, dead.
Report.loadColors = () => {
  const parse = name => Report.color(name).match(/[0-9a-f]{2}/gi).map(part => parseInt(part, 16));
  const [cold, even, hot, dead] = ["--cold", "--even", "--hot", "--dead"].map(parse);
  const mix = (a, b, part) => a.map((value, index) => Math.round(value + (b[index] - value) * part));
  return share => {
    if (share < 0.01) return dead;
    return share < 1 ? mix(cold, even, share) : mix(even, hot, Math.min(Math.log2(share) / 2, 1));
  };
};

const BELOW = 34; // pixels for column labels

Report.Heatmap = class {
  // `labels()` returns { rows, columns: [text], row, column: axis titles }; `pick` is called for a selected cell.
  constructor(box, { title, labels, pick }) {
    Object.assign(this, { box, pick, labels, row: 0, column: 0 });
    this.title = Report.element("h3", title);
    const head = Report.element("div", undefined, { class: "head" });
    head.append(this.title, Report.tools(this));
    this.readout = Report.element("div", undefined, { class: "readout", "aria-live": "polite" });
    this.canvas = Report.element("canvas", undefined, { tabindex: "0", role: "img" });
    box.append(head, this.readout, this.canvas);
    this.canvas.addEventListener("mousemove", event => this.at(event));
    this.canvas.addEventListener("click", event => { this.at(event); this.pick?.(this.row, this.column); });
    this.canvas.addEventListener("keydown", event => this.key(event));
    new ResizeObserver(() => this.rows && this.draw()).observe(box);
  }

  caption() { return this.title.textContent; }
  redraw() { this.draw(); }
  png() { return Report.picture(this.canvas, this.caption(), []); }

  csv() {
    const { rows, columns, row, column } = this.labels(), table = [[row, column, "share_of_fair_load"]];
    for (let at = 0; at < this.rows; at++) for (let to = 0; to < this.columns; to++) table.push([rows[at], columns[to], this.value(at, to)]);
    return Report.csvText(table);
  }

  // `value(row, column)` is the load relative to the fair share; `tell(row, column)` describes a cell in a sentence.
  set(rows, columns, value, tell, label) {
    Object.assign(this, { rows, columns, value, sentence: tell });
    this.canvas.setAttribute("aria-label", label);
    this.row = Math.min(this.row, rows - 1);
    this.column = Math.min(this.column, columns - 1);
    this.draw();
  }

  draw() {
    const { rows, columns, canvas } = this, ratio = devicePixelRatio || 1, texts = this.labels();
    const tall = this.box.classList.contains("full") ? Math.max(window.innerHeight - 160, 100) : 320;
    const cell = Math.min(Math.max(Math.floor(tall / rows), 5), tall > 320 ? tall : 48);
    const context = canvas.getContext("2d"), font = `${11 * ratio}px system-ui, sans-serif`;
    context.font = font;
    const left = 22 + Math.ceil(Math.max(...texts.rows.map(text => context.measureText(text).width)) / ratio);
    const width = Math.max(canvas.clientWidth - left, 20);
    this.left = left;
    const gap = cell > 12 && width / columns > 12 ? 1 : 0;
    const high = rows * cell + BELOW;
    canvas.style.height = `${high}px`;
    canvas.width = Math.round((left + width) * ratio);
    canvas.height = Math.round(high * ratio);
    this.writeLabels(context, texts, { left: left * ratio, w: (width * ratio) / columns, h: cell * ratio, ratio, font });
    const color = Report.loadColors(), w = (width * ratio) / columns, h = cell * ratio;
    context.save();
    context.translate(left * ratio, 0);
    context.textAlign = "center";
    context.textBaseline = "middle";
    context.font = font;
    for (let row = 0; row < rows; row++) {
      for (let column = 0; column < columns; column++) {
        const share = this.value(row, column), [r, g, b] = color(share);
        const x = Math.floor(column * w), right = Math.floor((column + 1) * w);
        context.fillStyle = `rgb(${r},${g},${b})`;
        context.fillRect(x, Math.floor(row * h), right - x - gap * ratio, h - gap * ratio);
        if (w > 34 * ratio && cell >= 18) {
          context.fillStyle = r * 0.299 + g * 0.587 + b * 0.114 > 140 ? "#111" : "#fff";
          context.fillText(share.toFixed(2), (x + right) / 2, (row + 0.5) * h);
        }
      }
    }
    if (document.activeElement === canvas) {
      context.strokeStyle = Report.color("--text");
      context.lineWidth = 2 * ratio;
      context.strokeRect(this.column * w, this.row * h, w - gap * ratio, h - gap * ratio);
    }
    context.restore();
    this.readout.textContent = this.sentence(this.row, this.column);
  }

  // Writes the labels that fit, always the first one, and the axis titles.
  writeLabels(context, texts, { left, w, h, ratio, font }) {
    Object.assign(context, { font, fillStyle: Report.color("--soft"), textBaseline: "middle", textAlign: "right" });
    const every = Math.ceil((13 * ratio) / h), bottom = texts.rows.length * h;
    texts.rows.forEach((text, row) => row % every === 0 && context.fillText(text, left - 4 * ratio, Math.max((row + 0.5) * h, 6 * ratio)));
    const widest = Math.max(...texts.columns.map(text => context.measureText(text).width)), step = Math.ceil((widest + 8 * ratio) / w);
    context.textAlign = "center";
    texts.columns.forEach((text, column) => {
      const middle = left + (column + 0.5) * w, half = context.measureText(text).width / 2;
      if (column % step === 0) context.fillText(text, Math.min(Math.max(middle, half), context.canvas.width - half), bottom + 10 * ratio);
    });
    context.fillText(texts.column, left + (texts.columns.length * w) / 2, bottom + 25 * ratio);
    context.translate(7 * ratio, bottom / 2);
    context.rotate(-Math.PI / 2);
    context.fillText(texts.row, 0, 0);
    context.setTransform(1, 0, 0, 1, 0, 0);
  }

  at(event) {
    const place = this.canvas.getBoundingClientRect(), x = event.clientX - place.left - this.left, y = event.clientY - place.top;
    this.column = Math.min(Math.max(Math.floor((x / (place.width - this.left)) * this.columns), 0), this.columns - 1);
    this.row = Math.min(Math.max(Math.floor((y / (place.height - BELOW)) * this.rows), 0), this.rows - 1);
    this.readout.textContent = this.sentence(this.row, this.column);
  }

  key(event) {
    const move = { ArrowLeft: [0, -1], ArrowRight: [0, 1], ArrowUp: [-1, 0], ArrowDown: [1, 0] }[event.key];
    if (event.key === "Enter") this.pick?.(this.row, this.column);
    if (!move) return;
    event.preventDefault();
    this.row = Math.min(Math.max(this.row + move[0], 0), this.rows - 1);
    this.column = Math.min(Math.max(this.column + move[1], 0), this.columns - 1);
    this.draw();
  }
};

// The whole section with its choice of run, time and layer.
Report.Experts = class {
  constructor(runs) {
    this.runs = runs.filter(run => run.experts);
    const view = document.getElementById("expert-view");
    if (!this.runs.length || !view) return;
    view.hidden = false;
    const id = name => document.getElementById(name);
    [this.runChoice, this.slider, this.when, this.layerChoice, this.table] = ["expert-run", "expert-time", "expert-when", "expert-layer", "expert-table"].map(id);
    this.runs.forEach((run, index) => this.runChoice.append(Report.element("option", run.name, { value: index })));
    const now = new Report.Heatmap(id("heat-now"), {
      title: "Load of all experts at one time",
      labels: () => ({ rows: this.experts.layers.map(String), columns: this.names(), row: "layer", column: "expert" }),
      pick: row => { this.layerChoice.value = row; this.draw(); },
    });
    const over = new Report.Heatmap(id("heat-over"), {
      title: "",
      labels: () => ({ rows: this.names(), columns: this.times(), row: "expert", column: Report.AXES[this.axis()].name }),
      pick: (row, column) => { this.slider.value = column; this.draw(); },
    });
    Object.assign(this, { now, over });
    this.runChoice.addEventListener("change", () => { this.choose(); Report.draw(); });
    this.slider.addEventListener("input", () => this.draw());
    this.layerChoice.addEventListener("change", () => this.draw());
    id("expert-table-box").addEventListener("toggle", () => this.draw());
    for (const map of [now, over]) for (const name of ["focus", "blur"]) map.canvas.addEventListener(name, () => map.draw());
    this.choose();
  }

  get run() { return this.runs[Number(this.runChoice.value)]; }
  get experts() { return this.run.experts; }

  choose() {
    const { experts } = this;
    this.values = Report.load(experts);
    this.slider.max = experts.bounds.length - 1;
    this.slider.value = experts.bounds.length - 1;
    this.layerChoice.textContent = "";
    experts.layers.forEach((layer, index) => this.layerChoice.append(Report.element("option", String(layer), { value: index })));
    this.draw();
  }

  names() { return [...Array(this.experts.num_experts).keys()].map(String); }

  // The x axis of the curves, or the iteration if that axis is unknown for this run.
  axis() { return this.experts.x[Report.state.axis]?.every(value => value != null) ? Report.state.axis : "iteration"; }

  times() {
    const axis = this.axis();
    return this.experts.bounds.map(([, last], time) => (axis === "iteration" ? String(last) : Report.AXES[axis].show(this.experts.x[axis][time])));
  }

  share(time, layer, expert) {
    const { layers, num_experts: count, scale } = this.experts;
    return this.values[(time * layers.length + layer) * count + expert] / scale;
  }

  period(time) {
    const [first, last] = this.experts.bounds[time];
    return first === last ? `iteration ${last}` : `iterations ${first} to ${last}`;
  }

  tell(time, layer, expert) {
    const share = this.share(time, layer, expert), part = (100 * share) / this.experts.num_experts;
    const dead = share < 0.01 ? ", dead" : "";
    return `${this.period(time)}, layer ${this.experts.layers[layer]}, expert ${expert}: ${share.toFixed(2)} of its fair share (${part.toFixed(1)}% of the slots${dead})`;
  }

  draw() {
    if (!this.runs.length || !this.slider || !this.now.canvas.clientWidth) return;
    const { experts, over, now } = this, time = Number(this.slider.value), layer = Number(this.layerChoice.value);
    const times = experts.bounds.length, { layers, num_experts: count } = experts;
    this.when.textContent = this.period(time);
    this.slider.setAttribute("aria-valuetext", this.period(time));
    now.set(layers.length, count, (row, column) => this.share(time, row, column), (row, column) => this.tell(time, row, column),
      `Expert load in all layers at ${this.period(time)}; move with the arrow keys, the table below lists the numbers`);
    over.title.textContent = `Expert load in layer ${layers[layer]} over time`;
    over.set(count, times, (row, column) => this.share(column, layer, row), (row, column) => this.tell(column, layer, row),
      `Expert load in layer ${layers[layer]} over time; move with the arrow keys`);
    if (this.table.closest("details").open) this.fill(time);
  }

  fill(time) {
    const { layers, num_experts: count } = this.experts, range = [...Array(count).keys()];
    const head = Report.element("tr"), body = Report.element("tbody"), top = Report.element("thead");
    head.append(Report.element("th", "layer"), ...range.map(expert => Report.element("th", `expert ${expert}`)));
    top.append(head);
    layers.forEach((name, layer) => {
      const row = Report.element("tr");
      row.append(Report.element("th", String(name)), ...range.map(expert => Report.element("td", this.share(time, layer, expert).toFixed(2))));
      body.append(row);
    });
    this.table.replaceChildren(top, body);
  }
};
