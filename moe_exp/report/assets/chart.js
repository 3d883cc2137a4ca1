// Line charts over uPlot: hover, arrow keys, gaps and marks. Text from runs goes into the page as text, never as markup.
"use strict";
const Report = { charts: [], state: { axis: "consumed_tokens", smoothing: 0, logX: false, logY: false, hidden: new Set() } };

Report.color = name => getComputedStyle(document.documentElement).getPropertyValue(name).trim();
Report.element = (tag, text, attributes = {}) => {
  const made = document.createElement(tag);
  if (text !== undefined) made.textContent = text;
  for (const [name, value] of Object.entries(attributes)) made.setAttribute(name, value);
  return made;
};
Report.short = value => {
  if (value == null) return "–";
  const size = Math.abs(value);
  if (size >= 1e3) {
    const power = Math.min(Math.floor(Math.log10(size) / 3 + 1e-9), 8);
    return `${+(value / 1000 ** power).toPrecision(4)}${["", "k", "M", "G", "T", "P", "E", "Z", "Y"][power]}`;
  }
  return size && size < 1e-3 ? value.toExponential(2) : String(+value.toPrecision(4));
};
Report.duration = seconds => {
  if (seconds == null) return "–";
  if (seconds < 120) return `${+seconds.toPrecision(3)} s`;
  if (seconds < 7200) return `${(seconds / 60).toFixed(1)} min`;
  return seconds < 172800 ? `${(seconds / 3600).toFixed(1)} h` : `${(seconds / 86400).toFixed(1)} days`;
};
Report.AXES = {
  consumed_tokens: { name: "tokens", show: Report.short },
  consumed_flops: { name: "FLOPs", show: Report.short },
  training_seconds: { name: "wall time", show: Report.duration },
  iteration: { name: "iteration", show: value => (value == null ? "–" : String(Math.round(value))) },
};

// Exponential moving average without the bias of its first values (Kingma and Ba 2015), taken forwards and backwards, and the mean of
// the two: one alone lags behind a falling loss. Gaps stay gaps.
Report.smoothed = (values, weight) => {
  const pass = ordered => {
    let sum = 0, total = 0;
    return ordered.map(value => {
      if (value == null) return value;
      sum = weight * sum + (1 - weight) * value;
      total = weight * total + (1 - weight);
      return sum / total;
    });
  };
  const back = pass([...values].reverse()).reverse();
  return pass(values).map((value, index) => (value == null ? value : (value + back[index]) / 2));
};

// Drawn in round units: hours, not thousands of seconds.
Report.timeUnit = most => (most < 300 ? [1, "seconds"] : most < 10800 ? [60, "minutes"] : most < 345600 ? [3600, "hours"] : [86400, "days"]);

Report.Chart = class {
  // `series()` gives [{ label, color, dash, x: {axis: []}, y: [], low, high, gaps: [index], marks: {axis: [], value: []}, changes: {axis: [], text: []}, points }].
  constructor(box, { title, series, show = Report.short, smooth = false, zero = false, note = "", height = 230 }) {
    Object.assign(this, { box, title, series, show, smooth, zero, height, plot: null });
    box.append(Report.element("h3", title));
    this.readout = Report.element("div", undefined, { class: "readout" });
    this.place = Report.element("div", undefined, { class: "plot", tabindex: "0", role: "group", "aria-roledescription": "chart" });
    this.place.setAttribute("aria-label", `${title}. Arrow keys move along the curves, Escape shows all.`);
    this.note = Report.element("div", note, { class: "note" });
    this.fixedNote = note;
    box.append(this.readout, this.place, this.note);
    this.place.addEventListener("keydown", event => this.key(event));
    this.place.addEventListener("focus", () => this.readout.setAttribute("aria-live", "polite"));
    this.place.addEventListener("blur", () => this.readout.removeAttribute("aria-live"));
    new ResizeObserver(() => this.resize()).observe(box);
    Report.charts.push(this);
  }

  width() { return Math.max(this.place.clientWidth, 120); }
  resize() { if (this.plot && this.plot.width !== this.width()) this.plot.setSize({ width: this.width(), height: this.height }); }

  draw() {
    if (this.plot) this.plot.destroy();
    this.plot = null;
    this.readout.textContent = "";
    const { axis, logX, logY, smoothing } = Report.state;
    const all = this.series();
    this.box.hidden = !all.length;
    if (!all.length) return;
    this.shown = all.filter(one => (one.x[axis] || []).some((value, index) => value != null && one.y[index] != null));
    const absent = all.filter(one => !this.shown.includes(one)).map(one => one.label);
    this.note.textContent = [this.fixedNote, absent.length ? `No ${Report.AXES[axis].name} known for: ${absent.join(", ")}.` : "", this.markNote()].filter(Boolean).join(" ");
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
      width: this.width(), height: this.height, series: [{}, ...series], bands,
      scales: {
        x: { time: false, ...log(logX) },
        y: { ...log(logY), ...(this.zero && !logY ? { range: (u, low, high) => [0, (high || 1) * 1.05] } : {}) },
      },
      axes: [
        { ...pen, ...label, label: this.unit, size: 34, space: 60, values: ticks(Report.short) },
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

  // One table of uPlot per series: x, the curve, with smoothing the smoothed one, and its range if it has one.
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
      if (smoothing) {
        table.push(pick(Report.smoothed(one.y, smoothing)));
        series.push({ ...pen, label: one.label, width: 2.2, points: { show: false } });
      }
      this.main.push(series.length);
      if (one.low) {
        table.push(pick(one.high), pick(one.low));
        series.push({ width: 0, stroke: "transparent", points: { show: false } }, { width: 0, stroke: "transparent", points: { show: false } });
        bands.push({ series: [series.length - 1, series.length], fill: faded(one.color) });
      }
      tables.push(table);
    }
    return [tables, series, bands];
  }

  markNote() {
    const parts = [];
    if (this.shown.some(one => (one.gaps || []).length)) parts.push("× marks records that are not a number.");
    if (this.shown.some(one => one.marks && one.marks.value.length)) parts.push("▼ marks spikes.");
    const changed = this.shown.flatMap(one => (one.changes || { text: [] }).text.map(text => (this.shown.length > 1 ? `${one.label}, ${text}` : text)));
    if (changed.length) parts.push(`┆ marks resumes with changed settings, after iteration ${changed.join("; ")}.`);
    if (this.shown.some(one => one.low)) parts.push("The band is the range of the records that share a point.");
    return parts.join(" ");
  }

  drawMarks(u) {
    const { axis } = Report.state, context = u.ctx, ratio = devicePixelRatio || 1, { left, top, width, height } = u.bbox;
    context.save();
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
      for (const value of (one.changes || {})[axis] || []) {
        const x = value == null ? NaN : u.valToPos(value / this.divisor, "x", true);
        if (!(x >= left && x <= left + width)) continue;
        context.beginPath();
        context.moveTo(x, top); context.lineTo(x, top + height);
        context.stroke();
      }
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

  // What is under the cursor; without one the latest value of each curve, which makes the line a legend.
  tell(u) {
    const away = u.cursor.left == null || u.cursor.left < 0 || u.cursor.idx == null, axis = Report.AXES[Report.state.axis];
    const at = index => (away ? u.data[index].findLast(value => value != null) : u.data[index][u.cursor.idxs[index] ?? -1]);
    let found = this.shown.map((one, index) => ({ one, value: at(this.main[index]) })).filter(({ value }) => value != null);
    if (found.length > 8) {
      found.sort((a, b) => b.value - a.value);
      found = [found[0], found[found.length - 1]];
    }
    const x = away ? null : u.posToVal(u.cursor.left, "x") * this.divisor;
    const where = away ? "latest" : `${axis.name} ${axis.show(Report.state.axis === "iteration" ? Math.round(x) : +x.toPrecision(4))}`;
    this.readout.replaceChildren(Report.element("span", where));
    for (const { one, value } of found) {
      const item = Report.element("span"), swatch = Report.element("i", undefined, { class: "swatch" });
      swatch.style.setProperty("--c", one.color);
      item.append(swatch, Report.element("span", `${one.label} `, { class: "label", title: one.label }), Report.element("b", this.show(value)));
      this.readout.append(item);
    }
  }

  key(event) {
    const u = this.plot, step = { ArrowLeft: -1, ArrowRight: 1, PageUp: -20, PageDown: 20, Home: -Infinity, End: Infinity }[event.key];
    if (!u) return;
    if (event.key === "Escape") {
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

// The index of the value that is nearest in x: series of different runs seldom have one at the same x. None beyond a run's end.
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
