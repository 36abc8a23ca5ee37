"use strict";
// One trajectory, token by token. `page` is the payload of payload.py; `vocab` maps ids to texts, `special` lists added
// tokens; `mates` are [id, label] of its group, `link(id)` gives their address or null.
agentrl.trajectory = (host, page, vocab, special, mates, link) => {
  const { el, percent, count } = agentrl;
  const specials = new Set(special);
  const seconds = (value) => (value === null || value === undefined ? "–" : value < 0.995 ? Math.round(value * 1000) + " ms" : value.toFixed(2) + " s");
  const signed = (value) => (value > 0 ? "+" : "") + value;

  // How each shading reads a token and maps it to [strength 0…1, colour class].
  const MODES = {
    "log-probability": { stream: "logprobs", scale: (v) => [Math.min(1, -v / 4), "surprise"], legend: ["certain", "surprising"] },
    "advantage": { stream: "advantages", scale: (v) => [Math.min(1, Math.abs(v) / 2), v >= 0 ? "plus" : "minus"], legend: ["none", "strong"] },
    "weight": { stream: "weights", scale: (v) => [Math.min(1, Math.abs(Math.log2(Math.max(v, 1e-3)))), v >= 1 ? "plus" : "minus"], legend: ["1", "2× or ½"] },
    "version": { stream: "versions", scale: (v) => [versions.length < 2 ? 0.3 : 0.12 + 0.88 * versions.indexOf(v) / (versions.length - 1), "age"], legend: ["oldest", "newest"] },
    "teacher": { stream: "teacher_gap", scale: (v) => [Math.min(1, Math.abs(v) / 4), v >= 0 ? "plus" : "minus"], legend: ["teacher: less likely", "more likely"] },
  };
  const versions = [...new Set(page.segments.flatMap((s) => s.versions || []).filter((v) => v !== null))].sort((a, b) => a - b);
  const has = (stream) => page.segments.some((segment) => segment[stream]);
  const modes = Object.keys(MODES).filter((name) => has(MODES[name].stream));
  let mode = modes[0] || null;

  const strength = (segment, at) => {
    const value = segment[MODES[mode].stream] ? segment[MODES[mode].stream][at] : null;
    return value === null || value === undefined ? null : MODES[mode].scale(value);
  };

  // Control and direction-changing characters as escapes, so that they are seen and not obeyed.
  const visible = (text) => text.replace(/[\u0000-\u0008\u000b-\u001f\u007f-\u009f\u200e\u200f\u202a-\u202e\u2066-\u2069]/g, (c) => {
    const code = c.charCodeAt(0).toString(16);
    return code.length > 2 ? "\\u" + code : "\\x" + code.padStart(2, "0");
  });
  const pieceOf = (segment, at) => {
    const piece = at in segment.cut ? segment.cut[at] : vocab[segment.ids[at]];
    return piece === undefined ? "⟨" + segment.ids[at] + "⟩" : piece;
  };
  const nameOf = (id) => (vocab[id] === undefined ? "⟨" + id + "⟩" : vocab[id]);

  const spans = [];
  const agentTokens = page.segments.reduce((n, s) => n + s.spans.reduce((m, [kind, , , a, b]) => m + (kind === "agent" ? b - a : 0), 0), 0);
  const allTokens = page.segments.reduce((n, s) => n + s.ids.length, 0);

  const fact = (name, value) => el("div", "", [el("dt", "", name), el("dd", "", value)]);
  const outcomeText = page.outcome.replaceAll("_", " ") + (page.cause ? ": " + page.cause : "");
  const head = el("article", "card run", [
    el("h1", "", [el("span", "", page.task), el("span", "chip " + (page.outcome === "solved" ? "ok" : "warn"), outcomeText)]),
    el("p", "versions", page.id),
    el("dl", "facts", [
      fact("reward", page.reward === null ? "none" : String(page.reward)),
      fact("turns", String(page.turns.length)),
      fact("tokens", count(allTokens)),
      fact("agent's", allTokens ? count(agentTokens) + " (" + percent(agentTokens / allTokens, 0) + ")" : "0"),
      fact("seconds", page.seconds === null ? "–" : page.seconds.toFixed(1)),
      fact("policy versions", versions.length ? versions.join(", ") : "none"),
      fact("trained at step", page.trained_at_step === null ? "not trained" : String(page.trained_at_step)),
      fact("split", page.split),
      fact("source", page.source),
      fact("temperature", String(page.temperature)),
      ...(page.teacher ? [fact("teacher", page.teacher)] : []),
      ...(page.teacher_kl === null ? [] : [fact("distance to it", page.teacher_kl.toFixed(3) + " nats per token")]),
      ...(page.teacher_agreement === null ? [] : [fact("its first choice", percent(page.teacher_agreement, 1) + " of tokens")]),
      ...Object.entries(page.info)
        .filter(([name]) => name !== "turns") // shown above
        .map(([name, value]) => fact(name.replaceAll("_", " "), typeof value === "number" ? String(Number(value.toFixed(2))) : String(value))),
    ]),
    mates.length > 1
      ? el("nav", "mates", [el("span", "", "group"), ...mates.map(([id, label]) => {
          const href = link(id);
          return el(href ? "a" : "span", "mate" + (id === page.id ? " on" : ""), label, href ? { href, title: id } : { title: id });
        })])
      : null,
    page.has_text ? null : el("p", "note warn", "This run folder has no tokenizer/tokenizer.json: tokens are shown as their ids."),
  ]);

  const tokenNode = (segment, number, at, agentAt, kind, purpose, turn) => {
    const id = segment.ids[at], piece = pieceOf(segment, at);
    const node = el("span", "t", null);
    if (specials.has(id)) node.classList.add("special");
    if (at in segment.cut) node.classList.add("cut");
    if (kind === "agent" && segment.trained_mask && !segment.trained_mask[agentAt]) node.classList.add("untrained");
    const text = visible(piece);
    if (text.includes("\n") && !text.replaceAll("\n", "").trim()) {
      node.append(el("i", "nl", "↵".repeat(text.split("\n").length - 1)), text);
    } else node.append(text);
    spans.push({ node, segment, number, at, agentAt, kind, purpose, turn });
    node.dataset.i = spans.length - 1;
    return node;
  };

  const timing = (turn) => {
    const t = page.turns[turn];
    if (!t) return null;
    const parts = [["queue", t.queue_s], ["prefill", t.prefill_s], ["decode", t.decode_s], ["tool", t.tool_s]];
    return el("span", "timing", [...parts.map(([name, value]) => el("span", "", [name + " ", el("b", "", seconds(value))])), el("span", "", "finish: " + t.finish_reason)]);
  };

  const segments = page.segments.map((segment, number) => {
    const blocks = [];
    let turn = null, agentAt = 0;
    for (const [kind, purpose, spanTurn, start, stop] of segment.spans) {
      // A prompt is no turn of the agent's: the window of a compressed context opens with it again.
      if (kind !== "prompt" && spanTurn !== turn) {
        turn = spanTurn;
        blocks.push(el("h4", "turn", [el("span", "", "turn " + turn), timing(turn)]));
      }
      const label = kind === "agent" ? "agent · " + purpose : kind;
      const text = el("div", "flow");
      for (let at = start; at < stop; at++) text.append(tokenNode(segment, number, at, kind === "agent" ? agentAt++ : null, kind, purpose, spanTurn));
      blocks.push(el("div", "span " + kind + (purpose === "summarise" ? " summarise" : ""), [el("div", "who", [label, el("small", "", stop - start + " tokens")]), text]));
    }
    const name = `segment ${number + 1} of ${page.segments.length}`;
    return el("section", "segment", [el("header", "", [el("b", "", name), el("span", "", `${count(segment.ids.length)} tokens, one context window as the model saw it`)]), ...blocks]);
  });

  const bar = el("div", "shading");
  const shade = () => {
    for (const { node, segment, agentAt, kind } of spans) {
      if (kind !== "agent") continue;
      const found = mode === null ? null : strength(segment, agentAt);
      node.classList.remove("surprise", "plus", "minus", "age");
      node.style.removeProperty("--s");
      if (found) {
        node.classList.add(found[1]);
        node.style.setProperty("--s", found[0].toFixed(3));
      }
    }
    bar.replaceChildren(
      el("span", "key", [el("i", "swatch prompt"), "prompt"]), el("span", "key", [el("i", "swatch environment"), "environment"]),
      el("span", "key", [el("i", "swatch agent"), "agent"]), el("span", "key", [el("u", "", "dashed"), " not trained"]),
      el("span", "grow"),
      ...(mode === null ? [el("span", "key", "no per-token streams: a demonstration")] : [
        el("span", "key", "shade by"),
        el("span", "seg", modes.map((name) => {
          const button = el("button", name === mode ? "on" : "", name);
          button.addEventListener("click", () => { mode = name; shade(); });
          return button;
        })),
        ...(mode === "teacher" && disagreements ? [disagreements.stepper] : []),
        el("span", "key", [MODES[mode].legend[0], el("i", "ramp " + (mode === "log-probability" ? "surprise" : mode === "version" ? "age" : "both")), MODES[mode].legend[1]]),
      ])
    );
  };

  // What hovering (or the keyboard's or a finger's choice) tells about a token.
  const tip = el("div", "tip", null, { role: "status" });
  tip.hidden = true;
  const tell = (info) => {
    const { segment, number, at, agentAt, kind } = info;
    const value = (stream) => (agentAt === null || !segment[stream] ? null : segment[stream][agentAt]);
    const row = (name, text) => [el("dt", "", name), el("dd", "", text)];
    const rows = [...row("token id", String(segment.ids[at])), ...row("position", `${at} of segment ${number + 1}`), ...row("kind", kind)];
    if (kind === "agent") {
      const lp = value("logprobs"), trained = value("trained_mask"), teacher = value("teacher_logprobs"), first = value("teacher_top1");
      rows.push(...row("log-probability", lp === null ? "none" : `${lp.toFixed(4)}  (p = ${Math.exp(lp).toPrecision(3)})`));
      rows.push(...row("version", value("versions") === null ? "none" : String(value("versions"))));
      rows.push(...row("advantage", value("advantages") === null ? "none" : signed(value("advantages"))));
      rows.push(...row("weight", value("weights") === null ? "none" : String(value("weights"))));
      rows.push(...row("trained", trained === null ? "no" : trained ? "yes" : "no, masked"));
      if (teacher !== null) {
        const together = value("teacher_spans") === null ? "" : ", its share of tokens scored together";
        rows.push(...row("teacher", `${teacher.toFixed(4)}  (p = ${Math.exp(teacher).toPrecision(3)})${together}`));
        rows.push(...row("teacher − student", signed(value("teacher_gap").toFixed(4)) + (together && ", of all of them")));
      }
      if (first !== null) rows.push(...row("its first choice", first ? "yes" : "no"));
      for (const [id, logprob] of (segment.preferred || {})[at] || []) rows.push(...row("it prefers", `"${visible(nameOf(id)).replaceAll("\n", "↵")}"  ${percent(Math.exp(logprob), 1)}`));
    }
    const cut = at in segment.cut ? el("p", "", "part of a character that is cut between tokens") : null;
    tip.replaceChildren(el("code", "", JSON.stringify(visible(pieceOf(segment, at)))), cut || "", el("dl", "", rows));
  };
  const place = (node) => {
    tip.hidden = false;
    const box = node.getClientRects()[0] || node.getBoundingClientRect(), width = tip.offsetWidth, height = tip.offsetHeight;
    tip.style.left = Math.max(8, Math.min(box.left, innerWidth - width - 12)) + "px";
    tip.style.top = (box.bottom + height + 12 > innerHeight ? Math.max(8, box.top - height - 8) : box.bottom + 8) + "px";
  };
  const tokens = el("div", "tokens", segments);
  const show = (event) => {
    const node = event.target.closest ? event.target.closest(".t") : null;
    if (!node) { tip.hidden = true; return; }
    tell(spans[node.dataset.i]);
    place(node);
  };
  tokens.addEventListener("mouseover", show);
  tokens.addEventListener("click", show);
  tokens.addEventListener("mouseleave", () => { tip.hidden = true; });

  // Shows entries first…last in the middle of the window, shaded by the teacher.
  const jump = (first, last) => {
    mode = "teacher";
    shade();
    for (const { node } of spans) node.classList.remove("here");
    for (const { node } of spans.slice(first, last + 1)) node.classList.add("here");
    spans[first].node.scrollIntoView({ block: "center" });
    tell(spans[first]);
    place(spans[first].node);
  };
  const disagreements = agentrl.disagreements(spans, (entry) => visible(pieceOf(entry.segment, entry.at)), (id) => visible(nameOf(id)), jump);

  const patch = page.patch ? el("details", "card patch", [
    el("summary", "", "patch"),
    el("pre", "", page.patch.trimEnd().split("\n").map((line) => el("span", line.startsWith("+") ? "add" : line.startsWith("-") ? "del" : line.startsWith("@@") ? "hunk" : "", visible(line) + "\n"))),
    page.patch_cut ? el("p", "note", `cut: ${count(page.patch_cut)} more characters in the trajectory file`) : null,
  ]) : null;
  if (patch) patch.open = page.patch.length < 3000;

  const empty = page.segments.length ? null : el("p", "note", "Nothing was sampled before this episode's machine failed.");
  shade();
  host.replaceChildren(...[head, patch, disagreements && disagreements.card, bar, tokens, empty, tip].filter(Boolean));
};
