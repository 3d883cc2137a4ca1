// Line charts based on uPlot: hover, arrow keys, gaps, marks and bands.
"use strict";
Report.Chart = class {
  // `series()` gives [{ label, run, runs, color, dash, x: {axis: []}, y: [], last, low, high, members, gaps: [index], marks: {axis: [], value: []},
  // changes: {axis: [], text: [], kind: []}, points }]. `show` formats axis labels, `exact` the values above the chart.
  constructor(box, { title, series, show = Report.digits, exact = show, smooth = false, zero = false, signed = false, keep = false, note = "", height = 230 }) {
    Object.assign(this, { box, title, series, show, exact, smooth, zero, signed, keep, height, plot: null, range: { low: null, high: null } });
    const head = Report.element("div", undefined, { class: "head" });
    head.append(this.heading = Report.element("h3"), Report.tools(this));
    box.append(head);
    this.readout = Report.element("div", undefined, { class: "readout" });
    this.place = Report.element("div", undefined, { class: "plot", tabindex: "0", role: "group", "aria-roledescription": "chart" });
    this.place.setAttribute("aria-label", `${this.caption()}. Arrow keys move along the curves, Escape resets the view.`);
    this.note = Report.element("div", note, { class: "note" });
    this.fixedNote = note;
    box.append(this.readout, this.place, this.note);
    this.place.addEventListener("keydown", event => this.key(event));
    this.place.addEventListener("focus", () => this.readout.setAttribute("aria-live", "polite"));
    this.place.addEventListener("blur", () => this.readout.removeAttribute("aria-live"));
    new ResizeObserver(() => this.resize()).observe(box);
    Report.charts.push(this);
  }

  caption() { return typeof this.title === "function" ? this.title() : this.title; }
  size() {
    const isFull = this.box.classList.contains("full");
    return { width: Math.max(this.place.clientWidth, 120), height: isFull ? Math.max(this.place.clientHeight, 150) : this.height };
  }
  resize() {
    const { width, height } = this.size();
    if (this.plot && (this.plot.width !== width || this.plot.height !== height)) this.plot.setSize({ width, height });
  }
  redraw() { this.draw(true); }

  // Draws the chart unless its group is folded. Returns the value of constant curves that are not drawn, else null.
  draw(withConstants) {
    if (this.plot) this.plot.destroy();
    this.plot = null;
    if (this.box.closest("details:not([open])")) return null;
    this.readout.textContent = "";
    this.heading.textContent = this.caption();
    const { axis, logX, smoothing } = Report.state, logY = Report.state.logY && !this.signed;
    const all = this.series(), constant = this.keep || !all.length ? null : Report.constant(all, this.exact);
    this.box.hidden = !all.length || (constant !== null && !withConstants);
    if (this.box.hidden) return constant;
    this.drawSeries(all, axis, logX, logY, smoothing);
    return constant;
  }

  drawSeries(all, axis, logX, logY, smoothing) {
    this.shown = all.filter(one => (one.x[axis] || []).some((value, index) => value != null && one.y[index] != null));
    const absent = all.filter(one => !this.shown.includes(one)).map(one => one.label);
    this.note.textContent = [this.fixedNote, absent.length ? `Unknown ${Report.AXES[axis].name}: ${absent.join(", ")}.` : "", this.markNote()].filter(Boolean).join(" ");
    if (!this.shown.length) return;
    const most = Math.max(...this.shown.map(one => one.x[axis].reduce((best, value) => Math.max(best, value ?? 0), 0)));
    [this.divisor, this.unit] = axis === "training_seconds" ? Report.timeUnit(most) : [1, Report.AXES[axis].name];
    const [tables, series, bands] = this.columns(axis, this.smooth ? smoothing : 0, logX, logY);
    const data = uPlot.join(tables);
    const log = use => (use ? { distr: 3 } : {});
    const pen = { stroke: Report.color("--soft"), grid: { stroke: Report.color("--grid"), width: 1 }, ticks: { stroke: Report.color("--grid"), width: 1 }, font: "12px system-ui, sans-serif" };
    const label = { labelFont: "12px system-ui, sans-serif", labelSize: 18 };
    const ticks = show => (u, splits) => splits.map(value => (value == null ? "" : show(value)));
    this.plot = new uPlot({
      ...this.size(), series: [{}, ...series], bands,
      scales: {
        x: { time: false, ...log(logX) },
        y: { ...log(logY), range: (u, low, high) => this.limits(low, high, logY) },
      },
      axes: [
        { ...pen, ...label, label: this.unit, size: 34, space: 60, values: ticks(axis === "training_seconds" ? Report.digits : Report.AXES[axis].show) },
        { ...pen, size: 62, values: ticks(this.show) },
      ],
      legend: { show: false },
      cursor: {
        y: false, drag: { x: true, y: false }, sync: { key: `${axis}-${this.divisor}`, setSeries: false }, dataIdx: nearest,
        points: { size: 7 }, focus: { prox: -1 },
      },
      hooks: { draw: [u => this.drawMarks(u)], setCursor: [u => this.tell(u)] },
    }, data, this.place);
    this.tell(this.plot);
  }

  // The y range: chosen by the user, or else that of the data.
  limits(low, high, logY) {
    const found = low == null ? (logY ? [1, 10] : [0, 1])
      : logY ? uPlot.rangeLog(low, high, 10, true)
      : this.zero ? [0, (high || 1) * 1.05]
      : uPlot.rangeNum(low, high, 0.1, true);
    const from = logY && this.range.low <= 0 ? found[0] : this.range.low ?? found[0], to = this.range.high ?? found[1];
    return from < to ? [from, to] : found;
  }

  // One uPlot table per series: x, the curve, the smoothed curve if smoothing is on, and the band if it has one.
  columns(axis, smoothing, logX, logY) {
    const tables = [], series = [], bands = [];
    this.main = [];
    for (const one of this.shown) {
      const keep = one.x[axis].map((value, index) => (value != null && (!logX || value > 0) ? index : -1)).filter(index => index >= 0);
      const pick = values => keep.map(index => (logY && values[index] <= 0 ? null : values[index]));
      const table = [keep.map(index => one.x[axis][index] / this.divisor), pick(one.y)];
      const pen = { stroke: one.color, dash: one.dash, points: { show: one.points || undefined, size: one.points ? 6 : 4, fill: one.color } };
      const raw = { ...pen, label: one.label, width: smoothing ? 1 : 2, alpha: smoothing ? 0.3 : 1 };
      series.push(raw);
      const shown = this.spread(one, smoothing);
      if (smoothing) {
        table.push(pick(shown.y));
        series.push({ ...pen, label: one.label, width: 2.2, points: { show: false } });
      }
      this.main.push(series.length);
      if (shown.low) {
        table.push(pick(shown.high), pick(shown.low));
        series.push({ width: 0, stroke: "transparent", points: { show: false } }, { width: 0, stroke: "transparent", points: { show: false } });
        bands.push({ series: [series.length - 1, series.length], fill: faded(one.color) });
      }
      tables.push(table);
    }
    return [tables, series, bands];
  }

  // The curve as drawn, and its band. The band of several seeds is computed from their smoothed curves.
  spread(one, smoothing) {
    if (!smoothing) return one;
    if (one.members) return Report.spread(one.members.map(member => Report.smoothed(member, smoothing)));
    return { y: Report.smoothed(one.y, smoothing), low: one.low, high: one.high };
  }

  markNote() {
    const parts = [];
    if (this.shown.some(one => (one.gaps || []).length)) parts.push("× marks records whose value is not a number.");
    if (this.shown.some(one => one.marks && one.marks.value.length)) parts.push("▼ marks spikes.");
    const changed = this.shown.filter(one => one.changes && one.changes.text.length);
    if (changed.length) parts.push(`┆ marks data stages and resumes. ${changed.map(one => `${one.label}: ${one.changes.text.join("; ")}.`).join(" ")}`);
    if (this.shown.some(one => one.low && !one.members)) parts.push("A band is the range of the records combined in a point.");
    if (this.shown.some(one => one.members)) parts.push("For several seeds, the line is their mean and the band their range.");
    return parts.join(" ");
  }

  drawMarks(u) {
    const { axis } = Report.state, context = u.ctx, ratio = devicePixelRatio || 1, { left, top, width, height } = u.bbox;
    context.save();
    if (this.signed) {
      const zero = Math.round(u.valToPos(0, "y", true));
      context.strokeStyle = Report.color("--soft");
      context.lineWidth = ratio;
      if (zero >= top && zero <= top + height) context.strokeRect(left, zero, width, 0);
    }
    context.lineWidth = 1.6 * ratio;
    for (const one of this.shown) {
      context.strokeStyle = Report.color("--bad");
      for (const index of one.gaps || []) {
        const x = u.valToPos(one.x[axis][index] / this.divisor, "x", true), y = top + 8 * ratio, r = 3.5 * ratio;
        if (!(x >= left && x <= left + width)) continue;
        context.beginPath();
        context.moveTo(x - r, y - r); context.lineTo(x + r, y + r); context.moveTo(x - r, y + r); context.lineTo(x + r, y - r);
        context.stroke();
      }
      context.strokeStyle = one.color;
      context.setLineDash([3 * ratio, 4 * ratio]);
      for (const [index, value] of ((one.changes || {})[axis] || []).entries()) {
        const x = value == null ? NaN : u.valToPos(value / this.divisor, "x", true);
        if (!(x >= left && x <= left + width)) continue;
        context.globalAlpha = one.changes.kind[index] === "resume" ? 0.4 : 1;
        context.beginPath();
        context.moveTo(x, top); context.lineTo(x, top + height);
        context.stroke();
      }
      context.globalAlpha = 1;
      context.setLineDash([]);
      const marks = one.marks || { value: [] };
      context.fillStyle = one.color;
      marks.value.forEach((value, index) => {
        const x = u.valToPos(marks[axis][index] / this.divisor, "x", true), y = Math.max(u.valToPos(value, "y", true) - 5 * ratio, top + 6 * ratio), r = 4.5 * ratio;
        if (!(x >= left && x <= left + width && y <= top + height)) return;
        context.beginPath();
        context.moveTo(x - r, y - 1.6 * r); context.lineTo(x + r, y - 1.6 * r); context.lineTo(x, y);
        context.fill();
      });
    }
    context.restore();
  }

  // Shows the values under the cursor. Without a cursor, shows the latest value of each curve, as a legend.
  tell(u) {
    const away = u.cursor.left == null || u.cursor.left < 0 || u.cursor.idx == null, axis = Report.AXES[Report.state.axis];
    const isSmoothed = this.smooth && Report.state.smoothing > 0;
    const at = index => u.data[index][u.cursor.idxs[index] ?? -1];
    let found = this.shown.map((one, index) => {
      const main = this.main[index];
      if (away) return { one, value: one.last ?? one.y.findLast(value => value != null) };
      return isSmoothed ? { one, value: at(main - 1), smoothed: at(main) } : { one, value: at(main) };
    }).filter(({ value }) => value != null);
    if (found.length > 8) {
      found.sort((a, b) => b.value - a.value);
      found = [found[0], found[found.length - 1]];
    }
    const x = away ? null : u.posToVal(u.cursor.left, "x") * this.divisor;
    const where = away ? "latest" : `${axis.name} ${axis.show(Report.state.axis === "iteration" ? Math.round(x) : +x.toPrecision(4))}`;
    this.readout.replaceChildren(Report.element("span", where));
    for (const { one, value, smoothed } of found) {
      const item = Report.element("span"), swatch = Report.element("i", undefined, { class: "swatch" });
      swatch.style.setProperty("--c", one.color);
      item.append(swatch, Report.element("span", `${one.label} `, { class: "label", title: one.label }), Report.element("b", this.exact(value)));
      if (smoothed != null) item.append(Report.element("span", ` smoothed ${this.exact(smoothed)}`));
      this.readout.append(item);
    }
  }

  // The data shown in the chart, one row per point.
  csv() {
    const { axis, smoothing } = Report.state, rows = [["run", axis, "value", "smoothed", "low", "high"]];
    for (const one of this.shown || []) {
      const shown = this.spread(one, this.smooth ? smoothing : 0), isSmoothed = this.smooth && smoothing;
      one.x[axis].forEach((x, index) => rows.push([one.label, x, one.y[index], isSmoothed ? shown.y[index] : "", shown.low?.[index], shown.high?.[index]]));
    }
    return Report.csvText(rows);
  }

  png() {
    return Report.picture(this.plot.ctx.canvas, this.caption(), this.shown.map(({ label, color }) => ({ label, color })));
  }

  key(event) {
    const u = this.plot, step = { ArrowLeft: -1, ArrowRight: 1, PageUp: -20, PageDown: 20, Home: -Infinity, End: Infinity }[event.key];
    if (!u) return;
    if (event.key === "Escape") {
      if (this.box.classList.contains("full")) return;
      u.setData(u.data);
      u.setCursor({ left: -10, top: -10 });
    } else if (step !== undefined) {
      event.preventDefault();
      const xs = u.data[0], now = u.cursor.left >= 0 && u.cursor.idx != null ? u.cursor.idx : step > 0 ? -1 : xs.length;
      const index = Math.min(Math.max(now + step, 0), xs.length - 1);
      u.setCursor({ left: u.valToPos(xs[index], "x"), top: 10 });
    }
  }
};

// Index of the value nearest in x, because different runs rarely have values at the same x; null beyond a run's end.
function nearest(u, series, index, x) {
  const values = u.data[series], xs = u.data[0], reach = 0.02 * (xs[xs.length - 1] - xs[0]);
  if (values[index] != null) return index;
  let before = index, after = index;
  while (before >= 0 && values[before] == null) before--;
  while (after < values.length && values[after] == null) after++;
  if (before < 0) return after < values.length && xs[after] - x <= reach ? after : null;
  if (after >= values.length) return x - xs[before] <= reach ? before : null;
  return x - xs[before] <= xs[after] - x ? before : after;
}

function faded(color) {
  return /^#[0-9a-f]{6}$/i.test(color) ? `${color}33` : color;
}
