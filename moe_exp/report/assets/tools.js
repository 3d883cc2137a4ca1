// Menu of a chart or heatmap: CSV, PNG, full screen, and the range of the y axis.
"use strict";
Report.download = (name, blob) => {
  const link = Report.element("a", undefined, { href: URL.createObjectURL(blob), download: name });
  link.click();
  setTimeout(() => URL.revokeObjectURL(link.href), 10000);
};

const fileName = (title, ending) => `${title.toLowerCase().replace(/[^a-z0-9]+/g, "_").replace(/^_|_$/g, "")}.${ending}`;
const field = value => (/[",\n]/.test(String(value)) ? `"${String(value).replaceAll('"', '""')}"` : String(value ?? ""));
Report.csvText = rows => rows.map(row => row.map(field).join(",") + "\n").join("");

// Copies a canvas onto the background color of the page, below its title and legend.
Report.picture = (canvas, title, legend) => {
  const ratio = devicePixelRatio || 1, made = document.createElement("canvas"), pen = made.getContext("2d"), line = 20 * ratio, edge = 10 * ratio;
  const font = weight => `${weight} ${13 * ratio}px system-ui, sans-serif`;
  pen.font = font("");
  const places = [];
  let x = edge, y = 2 * line;
  for (const { label } of legend) {
    const width = pen.measureText(label).width + 26 * ratio;
    if (x > edge && x + width > canvas.width) { x = edge; y += line; }
    places.push([x, y]);
    x += width;
  }
  made.width = canvas.width + 2 * edge;
  const top = legend.length ? y + line / 2 : 1.6 * line;
  made.height = top + canvas.height + edge;
  pen.fillStyle = Report.color("--back");
  pen.fillRect(0, 0, made.width, made.height);
  pen.fillStyle = Report.color("--text");
  pen.font = font("bold");
  pen.fillText(title, edge, line);
  pen.font = font("");
  legend.forEach(({ label, color }, index) => {
    const [left, bottom] = places[index];
    pen.fillStyle = color;
    pen.fillRect(left, bottom - 10 * ratio, 10 * ratio, 10 * ratio);
    pen.fillStyle = Report.color("--text");
    pen.fillText(label, left + 15 * ratio, bottom);
  });
  pen.drawImage(canvas, edge, top);
  return made;
};

// `owner` provides box, caption(), csv(), png() and redraw(), and for a chart `range` = { low, high }.
Report.tools = owner => {
  const menu = Report.element("details", undefined, { class: "tools" }), panel = Report.element("div", undefined, { class: "panel" });
  const top = Report.element("summary", "⋯");
  const name = () => top.setAttribute("aria-label", `Tools for the chart ${owner.caption()}`);
  name();
  menu.addEventListener("toggle", name);
  const button = (text, act) => {
    const made = Report.element("button", text, { type: "button" });
    made.addEventListener("click", () => act(made));
    panel.append(made);
    return made;
  };
  button("CSV", () => Report.download(fileName(owner.caption(), "csv"), new Blob([owner.csv()], { type: "text/csv" })));
  button("PNG", () => owner.png().toBlob(blob => Report.download(fileName(owner.caption(), "png"), blob)));
  const full = button("full screen", () => fill(!owner.box.classList.contains("full")));
  full.setAttribute("aria-pressed", "false");
  const fill = on => {
    owner.box.classList.toggle("full", on);
    full.setAttribute("aria-pressed", String(on));
    full.textContent = on ? "exit full screen" : "full screen";
    menu.open = false;
    if (on && navigator.userActivation?.isActive) owner.box.requestFullscreen?.().catch(() => {}); // if the browser refuses, it fills the window
    else if (document.fullscreenElement) document.exitFullscreen();
    owner.redraw();
    top.focus();
  };
  owner.box.addEventListener("fullscreenchange", () => !document.fullscreenElement && owner.box.classList.contains("full") && fill(false));
  owner.box.addEventListener("keydown", event => {
    if (event.key !== "Escape") return;
    if (menu.open) { menu.open = false; top.focus(); } else if (owner.box.classList.contains("full")) fill(false);
  });
  if (owner.range) {
    const inputs = ["low", "high"].map(end => {
      const label = Report.element("label", end === "low" ? "y from " : "to "), input = Report.element("input", undefined, { type: "number", step: "any", placeholder: "auto" });
      input.setAttribute("aria-label", `${end === "low" ? "Lowest" : "Highest"} y of the chart ${owner.caption()}`);
      input.addEventListener("input", () => { owner.range[end] = input.value === "" ? null : Number(input.value); owner.redraw(); });
      label.append(input);
      panel.append(label);
      return input;
    });
    button("automatic y", () => { inputs.forEach(input => { input.value = ""; }); owner.range = { low: null, high: null }; owner.redraw(); });
  }
  menu.append(top, panel);
  return menu;
};
