// Transforms curves before drawing: smoothing, one curve with a band for several seeds, difference from the baseline.
"use strict";

// Exponential moving average over earlier points with bias correction, as in TensorBoard and wandb. Gaps stay gaps.
Report.smoothed = (values, weight) => {
  let sum = 0, total = 0;
  return values.map(value => {
    if (value == null) return value;
    sum = weight * sum + (1 - weight) * value;
    total = weight * total + (1 - weight);
    return sum / total;
  });
};

// Linear interpolation of `y` at the increasing `places`; null outside the range of x.
Report.interpolated = (x, y, places) => {
  const points = x.map((value, index) => [value, y[index]]).filter(([value, height]) => value != null && height != null);
  let at = 0;
  return places.map(place => {
    if (place == null || !points.length || place < points[0][0] || place > points[points.length - 1][0]) return null;
    while (at < points.length - 1 && points[at + 1][0] <= place) at++;
    while (at > 0 && points[at][0] > place) at--;
    const [left, low] = points[at], [right, high] = points[Math.min(at + 1, points.length - 1)];
    return right > left ? low + ((high - low) * (place - left)) / (right - left) : low;
  });
};

Report.spread = members => {
  const over = pick => members[0].map((_, index) => {
    const values = members.map(member => member[index]);
    return values.some(value => value == null) ? null : pick(values);
  });
  return {
    y: over(values => values.reduce((sum, value) => sum + value, 0) / values.length),
    low: over(values => Math.min(...values)), high: over(values => Math.max(...values)),
  };
};

// One curve per group of runs that differ only in SEED, over their common range, with the curves of its members.
Report.grouped = (list, groups, axis) => groups.flatMap(group => {
  const found = list.filter(one => group.includes(one.run));
  if (found.length < 2) return found;
  const [first] = found, members = found.map(one => Report.interpolated(one.x[axis], one.y, first.x[axis]));
  return [{
    ...first, label: `${first.label} (${found.length} seeds)`, seeds: found.flatMap(one => one.seeds), x: { [axis]: first.x[axis] }, members, ...Report.spread(members),
    gaps: [], marks: undefined, changes: Report.together(found.map(one => one.changes).filter(Boolean)), last: undefined,
  }];
});

// Marks of several runs; shared marks appear once.
Report.together = changes => {
  const all = changes.flatMap(one => one.text.map((_, index) => Object.fromEntries(Object.keys(one).map(name => [name, one[name][index]]))));
  const marks = [...new Map(all.map(mark => [`${mark.iteration} ${mark.text}`, mark])).values()].sort((a, b) => a.iteration - b.iteration);
  return marks.length ? Object.fromEntries(Object.keys(marks[0]).map(name => [name, marks.map(mark => mark[name])])) : undefined;
};

// Subtracts the curve of the baseline or its group from every other curve, seed by seed if `group` has the seeds of the curve.
Report.differences = (list, baseline, axis, group) => {
  const base = list.find(one => one.runs.includes(baseline));
  if (!base) return [];
  return list.filter(one => one !== base).map(one => {
    const ofSeed = list.find(other => group.includes(other.run) && other.seeds[0] === one.seeds[0]);
    const other = base.members || !ofSeed || ofSeed === one ? base : ofSeed;
    const isPaired = other.members && one.seeds.every(seed => other.seeds.includes(seed));
    const minus = (values, index) => {
      const theirs = Report.interpolated(other.x[axis], isPaired ? other.members[other.seeds.indexOf(one.seeds[index])] : other.y, one.x[axis]);
      return values.map((value, at) => (value == null || theirs[at] == null ? null : value - theirs[at]));
    };
    const members = one.members?.map(minus);
    return { ...one, y: minus(one.y, 0), members, ...(members ? Report.spread(members) : { low: undefined, high: undefined }), gaps: [], marks: undefined, changes: undefined, last: undefined };
  }).filter(one => one.y.some(value => value != null));
};

// Constant values of a chart's curves as text; null if a curve changes or has only one point.
Report.constant = (list, show) => {
  const values = new Set();
  for (const { y } of list) {
    const known = y.filter(value => value != null);
    if (known.length < 2 || known.some(value => Math.abs(value - known[0]) > 1e-9 * Math.abs(known[0]))) return null;
    values.add(show(known[0]));
  }
  return [...values].slice(0, 3).join(" / ") + (values.size > 3 ? " / ..." : "");
};
