// The curves of a job, drawn by Bokeh: loss with held-out loss and what changed the layout, and tokens a second.

import { byId, fill, h } from "./dom.js";
import { loss as showLoss, short, whole } from "./format.js";

const MOST_POINTS = 3000; // more than the chart has pixels; beyond it drawing slows the page and shows nothing

const FONT = "system-ui, sans-serif";

const colour = (name) => getComputedStyle(document.documentElement).getPropertyValue(name).trim();

/** Mean over a window around each value, so that it neither lags nor leads; narrower at both ends. */
function smooth(values) {
  const reach = Math.max(2, Math.round(values.length / 50));
  return values.map((_, place) => {
    const near = Math.min(reach, place, values.length - 1 - place);
    const window = values.slice(place - near, place + near + 1);
    return window.reduce((sum, value) => sum + value, 0) / window.length;
  });
}

/** At most MOST_POINTS of the metrics: of each stretch the one with the highest loss, so that spikes stay. */
function thin(metrics) {
  if (metrics.length <= MOST_POINTS) return metrics;
  const stretch = Math.ceil(metrics.length / (MOST_POINTS - 2));
  const kept = [metrics[0]];
  for (let start = 1; start < metrics.length - 1; start += stretch) {
    const some = metrics.slice(start, Math.min(start + stretch, metrics.length - 1));
    kept.push(some.reduce((most, metric) => (metric.loss > most.loss ? metric : most)));
  }
  kept.push(metrics.at(-1));
  return kept;
}

/** Where a generation began and how many replicas it had; without the name where there is no room for it. */
function changes(metrics) {
  const began = metrics.filter((metric, place) => place > 0 && metric.generation !== metrics[place - 1].generation);
  const room = 0.1 * (metrics.at(-1).step - metrics[0].step);
  const label = (metric, place) =>
    ((began[place + 1] ?? metrics.at(-1)).step - metric.step < room ? "" : `data ${metric.data}`);
  return { step: began.map((metric) => metric.step), label: began.map(label) };
}

export class Curves {
  constructor() {
    this.bySteps = new Map();
    this.plots = null;
    matchMedia("(prefers-color-scheme: dark)").addEventListener("change", () => this.plots && this.paint());
  }

  /** Draws the empty charts; once there is something to show, since their ranges come from it. */
  build(columns) {
    this.steps = new Bokeh.ColumnDataSource({ data: columns.steps });
    this.held = new Bokeh.ColumnDataSource({ data: columns.held });
    this.changes = new Bokeh.ColumnDataSource({ data: columns.changes });
    this.lossPlot = this.figure(250, 6);
    this.speedPlot = this.figure(120, 3);
    this.speedPlot.x_range = this.lossPlot.x_range;
    this.plots = [this.lossPlot, this.speedPlot];
    this.drawLines();
    this.paint();
    fill(byId("curves"));
    Bokeh.Plotting.show(new Bokeh.Column({ children: this.plots, sizing_mode: "stretch_width" }), byId("curves"));
    fill(byId("curves-legend"),
      h("span", { class: "key", "data-line": "raw" }, "each step"),
      h("span", { class: "key", "data-line": "smooth" }, "smoothed"),
      h("span", { class: "key", "data-line": "held" }, "held out"),
      h("span", { class: "key", "data-line": "change" }, "layout changed"));
  }

  figure(height, ticks) {
    const plot = Bokeh.Plotting.figure({
      height, sizing_mode: "stretch_width", tools: ["xpan", "xwheel_zoom", "reset"], active_scroll: null,
      toolbar_location: null, min_border_left: 52, min_border_right: 8, output_backend: "canvas",
      outline_line_color: null,
    });
    plot.yaxes[0].ticker.desired_num_ticks = ticks;
    for (const axis of plot.axes) axis.minor_tick_line_color = null;
    plot.xgrids[0].visible = false;
    plot.x_range.range_padding = 0.02;
    return plot;
  }

  drawLines() {
    const field = (name) => ({ field: name });
    const { lossPlot, speedPlot, steps, held, changes } = this;
    this.marks = this.plots.map((plot) => plot.vspan(field("step"), { source: changes, line_dash: "dashed" }));
    this.raw = lossPlot.line(field("step"), field("loss"), { source: steps, line_width: 1 });
    this.mean = lossPlot.line(field("step"), field("smooth"), { source: steps, line_width: 2 });
    this.heldDots = lossPlot.scatter(field("step"), field("loss"), { source: held, size: 7, line_width: 1.5 });
    this.speed = speedPlot.line(field("step"), field("speed"), { source: steps, line_width: 1.3 });
    this.labels = new Bokeh.LabelSet({
      x: field("step"), y: 4, y_units: "screen", text: field("label"), source: changes, x_offset: 4,
      text_font_size: "10.5px",
    });
    lossPlot.add_layout(this.labels);
    const hover = new Bokeh.HoverTool({
      renderers: [this.raw], mode: "vline", line_policy: "nearest",
      tooltips: [["step", "@step{0,0}"], ["loss", "@loss{0.0000}"], ["tokens/s", "@speed{0.0a}"],
        ["grad norm", "@norm{0.000}"], ["lr", "@lr{0.0000000}"], ["replicas", "@data"]],
    });
    lossPlot.add_tools(hover);
    speedPlot.yaxes[0].formatter = new Bokeh.NumeralTickFormatter({ format: "0.[0]a" });
    lossPlot.yaxes[0].formatter = new Bokeh.BasicTickFormatter({ use_scientific: false, precision: "auto" });
    speedPlot.yaxes[0].axis_label = "tokens/s";
    lossPlot.yaxes[0].axis_label = "nats a token";
    speedPlot.xaxes[0].axis_label = "step";
  }

  /** Gives everything the colours of the theme in force. */
  paint() {
    const ink = colour("--muted"), line = colour("--line"), accent = colour("--accent"), surface = colour("--surface");
    for (const plot of this.plots) {
      plot.background_fill_color = surface; // not transparent: what was drawn before would shine through at the edges
      plot.border_fill_color = surface;
      for (const axis of plot.axes) {
        axis.axis_line_color = line;
        axis.major_tick_line_color = line;
        axis.major_label_text_color = ink;
        axis.axis_label_text_color = ink;
        axis.axis_label_text_font_style = "normal";
        axis.axis_label_text_font_size = "11px";
        axis.major_label_text_font_size = "11px";
        axis.axis_label_text_font = FONT;
        axis.major_label_text_font = FONT;
      }
      plot.ygrids[0].grid_line_color = line;
    }
    this.raw.glyph.line_color = accent;
    this.raw.glyph.line_alpha = 0.45;
    this.mean.glyph.line_color = accent;
    this.speed.glyph.line_color = accent;
    this.heldDots.glyph.fill_color = surface;
    this.heldDots.glyph.line_color = colour("--amber");
    for (const mark of this.marks) mark.glyph.line_color = colour("--violet");
    this.labels.text_color = colour("--violet");
    this.labels.text_font = FONT;
  }

  /** Takes metrics in any order; a step that was done again replaces what it was. */
  take(metrics) {
    for (const metric of metrics) this.bySteps.set(metric.step, metric);
    if (this.waiting) return;
    // Many arrive in one go: draw once a frame. A timer, since a hidden page has no frames.
    this.waiting = setTimeout(() => { this.waiting = null; this.draw(); }, 30);
  }

  draw() {
    const all = [...this.bySteps.values()].sort((one, other) => one.step - other.step);
    if (!all.length) return;
    const some = thin(all);
    const column = (name) => some.map((metric) => metric[name]);
    const measured = all.filter((metric) => metric.validation_loss !== null && metric.validation_loss !== undefined);
    const columns = {
      steps: {
        step: column("step"), loss: column("loss"), smooth: smooth(column("loss")),
        speed: column("tokens_per_s"), lr: column("lr"), norm: column("grad_norm"), data: column("data"),
      },
      held: { step: measured.map((metric) => metric.step), loss: measured.map((metric) => metric.validation_loss) },
      changes: changes(all),
    };
    if (!this.plots) this.build(columns);
    for (const name of ["steps", "held", "changes"]) this[name].data = columns[name];
    const first = all[0], last = all.at(-1);
    byId("curves").setAttribute("aria-label",
      `Loss from ${showLoss(first.loss)} at step ${whole(first.step)} to ${showLoss(last.loss)} at step ${whole(last.step)}; ` +
      `${short(last.tokens_per_s)} tokens a second`);
  }
}
