// Number formatting with the rules of moe_exp/host/quantities.py, and small helpers. Text from runs is inserted as text, never as markup.
"use strict";
const Report = {
  charts: [],
  state: { axis: "consumed_tokens", smoothing: 0, logX: false, logY: false, hidden: new Set(), baseline: 0, bands: true },
};

Report.color = name => getComputedStyle(document.documentElement).getPropertyValue(name).trim();
Report.element = (tag, text, attributes = {}) => {
  const made = document.createElement(tag);
  if (text !== undefined) made.textContent = text;
  for (const [name, value] of Object.entries(attributes)) made.setAttribute(name, value);
  return made;
};

// Python's format `.<digits>g`.
Report.digits = (value, digits = 4) => {
  if (value == null) return "–";
  const [mantissa, power] = value.toExponential(digits - 1).split("e");
  if (value && (power < -4 || power >= digits)) return `${+mantissa}e${power < 0 ? "-" : "+"}${String(Math.abs(power)).padStart(2, "0")}`;
  return String(+value.toPrecision(digits));
};
const scaled = (value, letters) => {
  if (value == null) return "–";
  let power = 0;
  while (power < letters.length - 1 && +Math.abs(value).toPrecision(4) >= 1000) { value /= 1000; power++; }
  return (Math.abs(value) >= 1000 ? Math.round(value).toLocaleString("en-US") : Report.digits(value)) + letters[power];
};
Report.count = value => scaled(value, ["", "K", "M", "B", "T"]);
Report.flops = value => scaled(value, ["", "K", "M", "G", "T", "P", "E", "Z", "Y"]);
Report.rate = value => (value == null ? "–" : Math.round(value).toLocaleString("en-US"));
Report.loss = value => (value == null ? "–" : value.toFixed(4));
Report.percent = value => (value == null ? "–" : `${Report.digits(100 * value, 3)}%`);
Report.duration = seconds => {
  if (seconds == null) return "–";
  if (seconds < 120) return `${Report.digits(seconds, 3)} s`;
  if (seconds >= 1e10) return `${Report.digits(seconds / 86400)} days`;
  const whole = Math.round(seconds), days = Math.floor(whole / 86400), two = number => String(number).padStart(2, "0");
  const clock = `${Math.floor((whole % 86400) / 3600)}:${two(Math.floor((whole % 3600) / 60))}:${two(whole % 60)}`;
  return days ? `${days} ${days === 1 ? "day" : "days"}, ${clock}` : clock;
};
Report.bytes = value => {
  if (value == null) return "–";
  const units = ["bytes", "kB", "MB", "GB", "TB", "PB", "EB"];
  let power = 0;
  while (power < units.length - 1 && Math.abs(value) >= 999.5) { value /= 1000; power++; }
  return `${Math.abs(value) >= 999.5 ? Math.round(value).toLocaleString("en-US") : Report.digits(value, 3)} ${units[power]}`;
};

Report.AXES = {
  consumed_tokens: { name: "tokens", show: Report.count },
  consumed_flops: { name: "FLOPs", show: Report.flops },
  training_seconds: { name: "training time", show: Report.duration },
  iteration: { name: "iteration", show: value => (value == null ? "–" : String(Math.round(value))) },
};

// Time axes use suitable units: hours instead of thousands of seconds.
Report.timeUnit = most => (most < 300 ? [1, "seconds"] : most < 10800 ? [60, "minutes"] : most < 345600 ? [3600, "hours"] : [86400, "days"]);
