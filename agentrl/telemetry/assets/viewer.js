"use strict";
// The viewer's two pages: index and trajectory.
(() => {
  const address = (id) => "/trajectory/" + encodeURIComponent(id);
  const page = agentrl.data("page");
  if (page) {
    agentrl.trajectory(document.getElementById("trajectory"), page, agentrl.data("vocab"), agentrl.data("special"), agentrl.data("mates"), address);
  } else {
    agentrl.table(document.getElementById("trajectories"), agentrl.data("table"), agentrl.data("runs"), (run, id) => address(id));
  }
})();
