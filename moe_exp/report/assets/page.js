// The page: its charts, the controls above them, and the cost of a chosen loss.
"use strict";
(() => {
  const data = JSON.parse(document.getElementById("data").textContent), { state } = Report;
  const runs = data.runs.map((run, index) => Object.assign(run, { index }));
  state.baseline = data.baseline;
  const dashes = [undefined, [8, 4], [2, 3], [10, 3, 2, 3]];
  const style = run => ({ run: run.index, runs: groupOf(run.index), seeds: [run.seed], color: Report.color(`--run-${run.index % 8}`), dash: dashes[Math.floor(run.index / 8) % 4] });
  const groupOf = index => (state.bands ? data.groups.find(group => group.includes(index)) : [index]);
  const shown = () => runs.filter(run => !state.hidden.has(run.index));
  const scaled = (values, factor) => (factor == null || !values ? values : values.map(value => (value == null ? null : value * factor)));

  const bySeed = list => (state.bands ? Report.grouped(list, data.groups, state.axis) : list);

  function ofRuns(key, options = {}) {
    return () => bySeed(shown().filter(run => run.curves[key]).map(run => {
      const curve = run.curves[key], factor = options.loss ? run.bits_per_nat : null;
      return {
        label: run.name, ...style(run), x: run.x, y: scaled(curve.mean, factor), low: scaled(curve.low, factor), high: scaled(curve.high, factor),
        last: scaled([curve.last ?? null], factor)[0], gaps: curve.gaps, marks: options.marks ? run.spikes : undefined, changes: options.changes ? run.changes : undefined,
      };
    }));
  }
  function ofValidation(key, factor = () => null) {
    return () => bySeed(shown().filter(run => run.valid[key].some(value => value != null)).map(run => ({
      label: run.name, ...style(run), x: run.valid, y: scaled(run.valid[key], factor(run)), points: true,
      gaps: run.valid[key].flatMap((value, index) => (value == null ? [index] : [])),
    })));
  }
  const ofBaseline = () => data.groups.find(group => group.includes(state.baseline));
  const minusBaseline = series => () => Report.differences(series(), state.baseline, state.axis, ofBaseline());
  const baselineName = () => runs[state.baseline].name;
  const bySeeds = data.groups.some(group => group.length > 1) ? "Runs are compared seed by seed where the baseline has the same seeds." : "";
  let experts = null;
  function ofLayers(key) {
    return () => {
      if (!experts?.runs.length) return [];
      const { experts: found, name } = experts.run;
      return found.layers.map((layer, index) => ({
        label: `layer ${layer}`, x: found.x, y: found[key][index],
        run: -1, runs: [], color: hue(found.layers.length > 1 ? index / (found.layers.length - 1) : 0), name,
      })).filter(one => one.y.some(value => value != null));
    };
  }
  const isDark = matchMedia("(prefers-color-scheme: dark)");
  const hue = part => `hsl(${Math.round(215 + 190 * part) % 360} 70% ${isDark.matches ? 66 : 42}%)`;
  const { percent, bytes, rate, loss: exact } = Report;
  const losses = ofRuns("lm_loss", { loss: true, changes: true }), validated = ofValidation("lm_loss", run => run.bits_per_nat);
  const tflops = value => Report.digits(value, 3);

  const charts = {
    loss: { title: `Training loss, ${data.unit}`, series: losses, exact, smooth: true, keep: true, height: 340 },
    valid: { title: `Validation loss, ${data.unit}`, series: validated, exact, keep: true },
    ema: { title: `Validation loss of the averaged weights, ${data.unit}`, series: ofValidation("ema_lm_loss", run => run.bits_per_nat), exact, keep: true },
    minus: { title: () => `Training loss relative to ${baselineName()}`, series: minusBaseline(losses), exact, smooth: true, signed: true, keep: true, note: bySeeds },
    "valid-minus": { title: () => `Validation loss relative to ${baselineName()}`, series: minusBaseline(validated), exact, signed: true, keep: true, note: bySeeds },
    ppl: { title: "Validation perplexity", series: ofValidation("lm_loss_ppl"), keep: true },
    bits: { title: "Validation, bits per byte", series: ofValidation("lm_loss_bits_per_byte"), exact, keep: true },
    mtp_loss: { title: "Multi-token prediction loss", series: ofRuns("mtp_loss"), smooth: true },
    grad_norm: { title: "Gradient norm before clipping", series: ofRuns("grad_norm", { marks: true }), smooth: true },
    learning_rate: { title: "Learning rate", series: ofRuns("learning_rate", { changes: true }) },
    tokens_per_second: { title: "Tokens per second (all ranks)", series: ofRuns("tokens_per_second"), show: rate, smooth: true, zero: true },
    tflops_per_gpu: { title: "Model TFLOP/s per rank", series: ofRuns("tflops_per_gpu"), show: tflops, smooth: true, zero: true },
    memory_bytes: { title: "Peak memory per rank", series: ofRuns("memory_bytes"), show: bytes, zero: true },
    balance: { title: "Load-balancing loss (1: balanced)", series: ofRuns("load_balancing_loss"), smooth: true },
    z_loss: { title: "Router z-loss", series: ofRuns("z_loss"), smooth: true },
    worst: { title: "Load of the busiest expert in any layer, relative to the mean", series: ofRuns("experts/max_over_mean"), smooth: true },
    dropped: { title: "Dropped slots, mean over layers", series: ofRuns("experts/dropped_fraction"), smooth: true, show: percent, zero: true },
    entropy: { title: "Router entropy, mean over layers, nats", series: ofRuns("experts/router_entropy"), smooth: true },
    dead: { title: "Dead experts (below 1% of the fair share), mean over layers", series: ofRuns("experts/dead_fraction"), show: percent, zero: true },
    "layer-entropy": { title: "Router entropy by layer, nats", series: ofLayers("router_entropy") },
    "layer-dropped": { title: "Dropped slots by layer", series: ofLayers("dropped_fraction"), show: percent, zero: true },
    "layer-worst": { title: "Load of the busiest expert by layer, relative to the mean", series: ofLayers("max_over_mean") },
    "layer-top1": { title: "Router weight of the first choice by layer", series: ofLayers("top1_weight") },
  };

  // Draws the charts of the open groups. Constant charts stay hidden until requested.
  const asked = new Set();
  function drawGroup(group) {
    const constants = [];
    for (const chart of Report.charts.filter(one => one.box.closest("details.group") === group)) {
      const constant = chart.draw(asked.has(group));
      if (constant !== null) constants.push(`${chart.caption()} (${constant})`);
    }
    const note = group.querySelector(".hidden-charts");
    if (!note) return;
    note.hidden = !constants.length;
    const show = Report.element("button", asked.has(group) ? "hide" : "show", { type: "button" });
    show.addEventListener("click", () => { asked[asked.has(group) ? "delete" : "add"](group); drawGroup(group); group.querySelector(".hidden-charts button").focus(); });
    const number = `${constants.length} constant ${constants.length === 1 ? "chart" : "charts"}`;
    note.replaceChildren(`${number} ${asked.has(group) ? "shown" : "hidden"}: ${constants.join(", ")}. `, show);
  }
  const groups = [...document.querySelectorAll("details.group")];
  Report.draw = () => { groups.forEach(drawGroup); experts?.draw(); };

  function controls() {
    const chips = document.getElementById("runs"), axis = document.getElementById("axis");
    for (const run of runs) {
      const chip = Report.element("button", undefined, { type: "button", "aria-pressed": "true" }), swatch = Report.element("i", undefined, { class: "swatch" });
      swatch.style.setProperty("--c", `var(--run-${run.index % 8})`);
      chip.append(swatch, run.name);
      chip.title = "show or hide this run";
      chip.addEventListener("click", () => {
        const hide = !state.hidden.has(run.index);
        state.hidden[hide ? "add" : "delete"](run.index);
        chip.setAttribute("aria-pressed", String(!hide));
        Report.draw();
      });
      chips.append(chip);
    }
    const known = Object.keys(Report.AXES).filter(name => runs.some(run => run.x[name].some(value => value != null)));
    if (!known.includes(state.axis)) state.axis = known[known.length - 1] || "iteration";
    for (const name of known) {
      const label = Report.element("label"), input = Report.element("input", undefined, { type: "radio", name: "axis", value: name });
      input.checked = name === state.axis;
      input.addEventListener("change", () => { state.axis = name; Report.draw(); });
      label.append(input, Report.AXES[name].name);
      axis.append(label);
    }
    const smoothing = document.getElementById("smoothing");
    const longest = Math.max(0, ...runs.map(run => run.x.iteration.length));
    smoothing.value = longest > 200 ? 0.9 : longest > 20 ? 0.6 : 0;
    const smooth = () => {
      state.smoothing = Number(smoothing.value);
      document.getElementById("smoothing-value").textContent = state.smoothing.toFixed(2);
    };
    smoothing.addEventListener("input", () => { smooth(); Report.draw(); });
    smooth();
    const baseline = document.getElementById("baseline");
    runs.forEach(run => baseline.append(Report.element("option", run.name, { value: run.index })));
    baseline.value = state.baseline;
    baseline.addEventListener("change", () => { state.baseline = Number(baseline.value); Report.draw(); });
    baseline.closest("label").hidden = runs.length < 2;
    const bands = document.getElementById("bands");
    bands.closest("label").hidden = data.groups.every(group => group.length < 2);
    bands.addEventListener("change", () => { state.bands = bands.checked; Report.draw(); });
    for (const [name, id] of [["logX", "log-x"], ["logY", "log-y"]]) {
      document.getElementById(id).addEventListener("change", event => { state[name] = event.target.checked; Report.draw(); });
    }
    document.getElementById("controls").hidden = !known.length;
  }

  // Interpolates linearly between two records, [before, at], to where the loss reaches the target; see comparison.cost_of.
  function onTheWay([lossBefore, loss], [before, at], target) {
    if (lossBefore == null || lossBefore <= target || before == null || at == null) return at;
    return before + (lossBefore - target) / (lossBefore - loss) * (at - before);
  }

  // Updates the resources that each run used to reach the chosen smoothed loss.
  function costs() {
    const input = document.getElementById("target-loss");
    if (!input) return;
    document.getElementById("target").hidden = false;
    const fill = () => {
      const target = Number(input.value);
      for (const row of document.querySelectorAll("tr[data-run]")) {
        const reach = runs[Number(row.dataset.run)].reach, index = reach.loss.findIndex(([, value]) => value != null && value <= target);
        for (const cell of row.querySelectorAll("td[data-axis]")) {
          cell.textContent = index < 0 ? "not reached" : Report.AXES[cell.dataset.axis].show(onTheWay(reach.loss[index], reach[cell.dataset.axis][index], target));
        }
      }
    };
    input.addEventListener("input", () => input.value && fill());
  }

  // Opens a group when a link points into it; marks tables that are wider than their frame.
  function folding() {
    const toggle = document.getElementById("fold"), all = [...document.querySelectorAll("details.group")];
    const isAll = () => all.every(group => group.open);
    const name = () => { toggle.textContent = isAll() ? "fold all" : "open all"; };
    toggle.hidden = false;
    toggle.addEventListener("click", () => { const open = !isAll(); all.forEach(group => { group.open = open; }); });
    all.forEach(group => group.addEventListener("toggle", () => { name(); if (group.open) { all.filter(one => group.contains(one)).forEach(drawGroup); experts.draw(); } }));
    name();
    const follow = () => {
      const group = document.getElementById(location.hash.slice(1))?.querySelector("details.group");
      if (group) group.open = true;
    };
    addEventListener("hashchange", follow);
    follow();
  }
  function scrolling() {
    for (const box of document.querySelectorAll(".scroll")) {
      const hint = Report.element("p", "scroll sideways for more →", { class: "swipe", "aria-hidden": "true" });
      box.before(hint);
      const check = () => {
        hint.hidden = box.scrollWidth <= box.clientWidth + 1;
        box.toggleAttribute("data-more", box.scrollWidth - box.clientWidth - box.scrollLeft > 4);
      };
      box.addEventListener("scroll", check, { passive: true });
      new ResizeObserver(check).observe(box);
      check();
    }
  }

  controls();
  costs();
  experts = new Report.Experts(runs);
  for (const box of document.querySelectorAll("[data-chart]")) new Report.Chart(box, charts[box.dataset.chart]);
  Report.draw();
  folding();
  scrolling();
  isDark.addEventListener("change", () => Report.draw());
  document.documentElement.dataset.ready = "true";
})();
