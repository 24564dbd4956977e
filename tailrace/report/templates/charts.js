const read = id => JSON.parse(document.getElementById(id).textContent);
const figures = read("figures-data");
const options = {responsive: true, displayModeBar: false};

const colour = name => getComputedStyle(document.documentElement).getPropertyValue(name).trim();

function themed(layout) {
  const axis = {
    gridcolor: colour("--grid"), linecolor: colour("--line"), zerolinecolor: colour("--grid"), automargin: true,
    exponentformat: "e",
  };
  const small = title => ({...title, font: {size: 12.5}, standoff: 10});
  return {
    margin: {l: 56, r: 12, t: 8, b: 44},
    hovermode: "closest",
    ...layout,
    xaxis: {...axis, showgrid: false, zeroline: false, showline: true, ...layout.xaxis, title: small(layout.xaxis.title)},
    yaxis: {...axis, ...layout.yaxis, title: small(layout.yaxis.title)},
    ...(layout.yaxis2 && {yaxis2: {...axis, ...layout.yaxis2, title: small(layout.yaxis2.title)}}),
    paper_bgcolor: "rgba(0,0,0,0)",
    plot_bgcolor: "rgba(0,0,0,0)",
    font: {family: getComputedStyle(document.body).fontFamily, size: 12.5, color: colour("--ink")},
    legend: {orientation: "h", x: 0, y: 1.02, yanchor: "bottom", bgcolor: "rgba(0,0,0,0)", ...layout.legend},
    hoverlabel: {bgcolor: colour("--panel"), bordercolor: colour("--line"), font: {color: colour("--ink")}},
  };
}

function drawFigures() {
  for (const [id, figure] of Object.entries(figures)) {
    Plotly.react(id, figure.data, themed(figure.layout), options);
  }
}
