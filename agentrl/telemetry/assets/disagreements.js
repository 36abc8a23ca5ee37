"use strict";
// Where student and teacher disagree most in a trajectory. `tokens` are trajectory.js' entries in order of the page, `text`
// gives an entry's piece and `name` a token id's, `jump` shows an entry. Returns the card and the stepper for the bar, or null.
agentrl.disagreements = (tokens, text, name, jump) => {
  const { el, percent } = agentrl;
  const FIRST = 8, MORE = 24, BEFORE = 14, AFTER = 5;
  const of = (entry, stream) => (entry.agentAt === null || !entry.segment[stream] ? null : entry.segment[stream][entry.agentAt]);

  // A place is a token, or the neighbours that were scored together.
  const places = [];
  tokens.forEach((entry, index) => {
    const gap = of(entry, "teacher_gap");
    if (gap === null || gap === 0) return;
    const before = places[places.length - 1], span = of(entry, "teacher_spans");
    if (before && span !== null && before.span === span && before.number === entry.number) before.last = index;
    else places.push({ first: index, last: index, gap, span, number: entry.number });
  });
  if (!places.length) return null;
  places.sort((a, b) => Math.abs(b.gap) - Math.abs(a.gap));

  let shown = Math.min(FIRST, places.length), current = -1;
  const list = el("ol", "places"), where = el("span", "key");
  const sum = (place, stream) => tokens.slice(place.first, place.last + 1).reduce((n, entry) => n + of(entry, stream), 0);
  const share = (logprob) => (logprob < Math.log(0.0005) ? "< 0.1 %" : percent(Math.exp(logprob), 1));
  const inLine = (piece) => piece.replaceAll("\n", "↵");
  const pieces = (from, to, number) => inLine(tokens.slice(Math.max(0, from), to).filter((entry) => entry.number === number).map(text).join(""));

  const line = (place, rank) => {
    const entry = tokens[place.first], preferred = (entry.segment.preferred || {})[entry.at];
    const [purpose, turn] = [entry.purpose, entry.turn];
    const button = el("button", "place" + (rank === current ? " on" : ""), [
      el("span", place.gap < 0 ? "gap minus" : "gap plus", (place.gap > 0 ? "+" : "−") + Math.abs(place.gap).toFixed(2)),
      el("code", "", [
        pieces(place.first - BEFORE, place.first, place.number),
        el("mark", "", pieces(place.first, place.last + 1, place.number)),
        pieces(place.last + 1, place.last + 1 + AFTER, place.number),
      ]),
      el("small", "", [
        `turn ${turn}, ${purpose} · student ${share(sum(place, "logprobs"))}, teacher ${share(sum(place, "teacher_logprobs"))}`,
        ...(preferred ? [" · teacher prefers ", ...preferred.flatMap(([id, logprob], i) => [i ? ", " : "", el("code", "", `"${inLine(name(id))}"`), " " + share(logprob)])] : []),
      ]),
    ], { type: "button" });
    button.addEventListener("click", () => go(rank));
    return el("li", "", [button]);
  };

  const draw = () => {
    list.replaceChildren(...places.slice(0, shown).map(line));
    more.hidden = shown >= places.length;
    where.textContent = current < 0 ? `${places.length} places` : `${current + 1} of ${places.length}`;
  };
  const go = (rank) => {
    current = (rank + places.length) % places.length;
    shown = Math.max(shown, Math.min(current + 1, places.length));
    draw();
    jump(places[current].first, places[current].last);
  };
  const more = el("button", "ghost", "show more", { type: "button" });
  more.addEventListener("click", () => { shown = Math.min(shown + MORE, places.length); draw(); });
  const step = (label, title, by) => {
    const button = el("button", "", label, { type: "button", title });
    button.addEventListener("click", () => go(current < 0 ? (by > 0 ? 0 : -1) : current + by));
    return button;
  };
  const stepper = el("span", "key", [el("span", "seg", [step("‹", "the place before, with a larger difference", -1), step("›", "the next place, with a smaller difference", 1)]), where]);
  const card = el("details", "card disagreements", [
    el("summary", "", "where student and teacher disagree most"),
    el("p", "note", "Log-probability of the teacher minus the student's when it sampled, in nats: below 0 the teacher finds what was done less likely. Choose one to read it in its place."),
    list,
    more,
  ]);
  card.open = true;
  draw();
  return { card, stepper };
};
