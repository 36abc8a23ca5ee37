"use strict";
// Draws charts.py's plain data with plotly: resolves colour names to the style sheet's variables, x to the chosen axis.
agentrl.charts = (charts, switcher) => {
  const variable = (name) => getComputedStyle(document.documentElement).getPropertyValue("--" + name).trim();
  const colour = (text) => {
    const [name, alpha] = text.slice(1).split("/");
    const value = variable(name);
    return alpha ? value + Math.round(255 * Number(alpha)).toString(16).padStart(2, "0") : value;
  };
  const resolve = (value, key) => {
    if (typeof value === "string") return value.startsWith("@") && /color$/i.test(key) ? colour(value) : value;
    if (Array.isArray(value) || value === null || typeof value !== "object") return value;
    return Object.fromEntries(Object.entries(value).map(([k, v]) => [k, resolve(v, k)]));
  };
  let axis = "step";

  const trace = (data) => {
    const out = resolve(data, "");
    if (data.x && !Array.isArray(data.x)) out.x = data.x[axis];
    return out;
  };

  // A legend of many entries takes several lines: the chart grows by them, so that they do not eat the plot.
  const legendRows = (shown, width) => Math.ceil(shown / Math.max(1, Math.floor(width / 190)));

  const layout = (chart, width) => {
    const shown = chart.traces.filter((t) => t.showlegend !== false).length;
    const ink = variable("ink-2"), grid = variable("line");
    const shared = { gridcolor: grid, zerolinecolor: grid, linecolor: grid, tickcolor: grid, automargin: true, title: { standoff: 10 } };
    const xTitle = chart.axis === "switch" ? axis : chart.x_title || "";
    return {
      height: (chart.tall ? 400 : 270) + 19 * (legendRows(shown, width) - 1),
      margin: { l: 46, r: 14, t: 8, b: 40 },
      paper_bgcolor: "rgba(0,0,0,0)", plot_bgcolor: "rgba(0,0,0,0)",
      font: { family: "system-ui, sans-serif", size: 12, color: ink },
      barmode: chart.stacked ? "stack" : undefined, bargap: 0.15,
      hovermode: chart.hover || "x unified",
      hoverlabel: { bgcolor: variable("surface"), bordercolor: grid, font: { color: variable("ink") } },
      legend: { orientation: "h", y: 1.02, yanchor: "bottom", x: 0, traceorder: "normal", font: { size: 12 } },
      showlegend: shown > 1,
      xaxis: { ...shared, showgrid: false, rangemode: chart.x_from_zero ? "tozero" : undefined, title: { text: xTitle, standoff: 8 } },
      yaxis: { ...shared, zeroline: false, exponentformat: "power", tickformat: chart.percent ? ".3~%" : chart.y_format, range: chart.bounds || undefined, rangemode: "tozero", title: { text: chart.y_title || "", standoff: 10 } },
    };
  };

  const draw = () => {
    for (const chart of charts) {
      const host = document.getElementById("chart-" + chart.id);
      if (host) Plotly.react(host, chart.traces.map(trace), layout(chart, host.clientWidth), { responsive: true, displaylogo: false, displayModeBar: false });
    }
  };

  for (const button of switcher.querySelectorAll("button")) {
    button.addEventListener("click", () => {
      axis = button.dataset.axis;
      for (const other of switcher.querySelectorAll("button")) other.classList.toggle("on", other === button);
      draw();
    });
  }
  document.addEventListener("themechange", draw);
  draw();
};
