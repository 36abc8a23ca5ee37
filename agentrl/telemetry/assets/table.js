"use strict";
// The table of trajectories: sorted by a click on a head, filtered as one types, a page of lines at a time.
agentrl.table = (host, rows, runs, link) => {
  const { el, percent, count } = agentrl;
  const [RUN, ID, STEP, TASK, SPLIT, REWARD, OUTCOME, TURNS, TOKENS, SHARE, VERSION, TRAINED, DISTANCE] = rows.length ? rows[0].keys() : Array(13).keys();
  const PAGE = 100;
  const number = (value) => (value === null ? "–" : String(value));
  const columns = [
    ["run", RUN, (row) => runs[row[RUN]], "word"],
    ["step", STEP, (row) => number(row[STEP]), "num"],
    ["task", TASK, (row) => row[TASK], "word"],
    ["split", SPLIT, (row) => row[SPLIT], "word"],
    ["reward", REWARD, (row) => number(row[REWARD]), "num"],
    ["outcome", OUTCOME, (row) => row[OUTCOME].replaceAll("_", " "), "word"],
    ["turns", TURNS, (row) => number(row[TURNS]), "num"],
    ["tokens", TOKENS, (row) => count(row[TOKENS]), "num"],
    ["agent share", SHARE, (row) => percent(row[SHARE], 0), "num"],
    ["oldest version", VERSION, (row) => number(row[VERSION]), "num"],
    ["trained", TRAINED, (row) => (row[TRAINED] ? "yes" : "no"), "word"],
    ["teacher kl", DISTANCE, (row) => (row[DISTANCE] === null ? "–" : row[DISTANCE].toFixed(3)), "num"],
  ].filter(([name]) => (name !== "run" || runs.length > 1) && (name !== "teacher kl" || rows.some((row) => row[DISTANCE] !== null)));

  let sortBy = STEP, descending = true, shown = PAGE;
  const search = el("input", "search", null, { type: "search", placeholder: "task or trajectory id", "aria-label": "filter by task or id" });
  const choice = (index, label) => {
    const values = [...new Set(rows.map((row) => (index === OUTCOME ? row[index].split(":")[0] : row[index])))].sort();
    const select = el("select", "", [el("option", "", "any " + label, { value: "" })], { "aria-label": label });
    for (const value of values) select.append(el("option", "", value.replaceAll("_", " "), { value }));
    return select;
  };
  const outcome = choice(OUTCOME, "outcome"), split = choice(SPLIT, "split");
  const total = el("span", "count");
  const head = el("tr"), body = el("tbody");
  const more = el("button", "ghost more", "show more");

  for (const [label, index, , kind] of columns) {
    const button = el("button", "", label);
    button.addEventListener("click", () => {
      descending = sortBy === index ? !descending : kind === "num";
      sortBy = index;
      draw();
    });
    head.append(el("th", kind, [button], { "data-column": index, scope: "col" }));
  }

  const compare = (a, b) => {
    const [x, y] = [a[sortBy], b[sortBy]];
    if (x === y) return 0;
    if (x === null || y === null) return x === null ? 1 : -1;
    const order = typeof x === "string" ? x.localeCompare(y) : x - y;
    return descending ? -order : order;
  };

  const line = (row) => {
    const href = link(row[RUN], row[ID]);
    const tr = el("tr", href ? "linked" : "", null, { title: row[ID] });
    for (const [label, , text, kind] of columns) {
      let content = text(row);
      if (label === "task" && href) content = el("a", "", content, { href });
      if (label === "outcome") content = el("span", "outcome " + row[OUTCOME].split(":")[0].split("_")[0], content);
      tr.append(el("td", kind, content));
    }
    if (href) tr.addEventListener("click", (event) => { if (event.target.tagName !== "A") location.href = href; });
    return tr;
  };

  const draw = () => {
    const words = search.value.toLowerCase().split(/\s+/).filter(Boolean);
    const found = rows.filter((row) =>
      words.every((word) => row[TASK].toLowerCase().includes(word) || row[ID].toLowerCase().includes(word)) &&
      (!outcome.value || row[OUTCOME].split(":")[0] === outcome.value) && (!split.value || row[SPLIT] === split.value)
    ).sort(compare);
    total.textContent = found.length === rows.length ? `${count(rows.length)} trajectories` : `${count(found.length)} of ${count(rows.length)}`;
    for (const th of head.children) {
      const on = Number(th.dataset.column) === sortBy;
      th.setAttribute("aria-sort", on ? (descending ? "descending" : "ascending") : "none");
    }
    body.replaceChildren(...found.slice(0, shown).map(line));
    more.hidden = found.length <= shown;
  };

  for (const input of [search, outcome, split]) input.addEventListener("input", () => { shown = PAGE; draw(); });
  more.addEventListener("click", () => { shown += 5 * PAGE; draw(); });
  host.replaceChildren(
    el("div", "filters", [search, outcome, split, total]),
    rows.length
      ? el("div", "scroll", [el("table", "trajectories", [el("thead", "", [head]), body])])
      : el("p", "note", "No trajectory files yet: they are written when a group is trained, filtered or dropped."),
    more
  );
  if (rows.length) draw(); else more.hidden = true;
};
