"use strict";
// The report: plots, table, and trajectory pages shown in place (address `#t/RUN/ID`).
(() => {
  const pages = agentrl.data("pages"), vocabs = agentrl.data("vocabs"), specials = agentrl.data("specials");
  const overview = document.getElementById("overview"), detail = document.getElementById("detail");
  const crumb = document.getElementById("crumb"), axis = document.getElementById("axis"), heading = crumb.textContent;
  const known = (run, id) => Object.hasOwn(pages, run + "/" + id);
  const address = (run, id) => (known(run, id) ? "#t/" + run + "/" + encodeURIComponent(id) : null);

  agentrl.charts(agentrl.data("charts"), axis);
  agentrl.table(document.getElementById("trajectories"), agentrl.data("table"), agentrl.data("runs"), address);

  const mates = (run, page) => Object.entries(pages)
    .filter(([key, other]) => key.startsWith(run + "/") && other.group === page.group)
    .map(([, other]) => [other.id, other.reward === null ? other.outcome : String(other.reward)]);

  let scrolled = 0;
  const route = () => {
    const match = /^#t\/(\d+)\/(.+)$/.exec(location.hash);
    let id = null;
    try { id = match && decodeURIComponent(match[2]); } catch { id = null; }
    const shown = id !== null && known(match[1], id);
    if (shown && detail.hidden) scrolled = scrollY;
    overview.hidden = shown;
    axis.hidden = shown;
    detail.hidden = !shown;
    crumb.textContent = shown ? id : heading;
    if (shown) {
      const run = Number(match[1]), page = pages[run + "/" + id];
      agentrl.trajectory(detail, page, vocabs[run], specials[run], mates(run, page), (mate) => address(run, mate));
      scrollTo(0, 0);
    } else {
      detail.replaceChildren();
      scrollTo(0, scrolled);
    }
  };
  addEventListener("hashchange", route);
  route();
})();
