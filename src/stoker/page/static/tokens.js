// Tokens as a person reads them: what is trained on a tint, special tokens in small capitals, cuts and ends of documents
// as rules; a press or the arrow keys pick one and say its id and position. Values by token are shown as a heat strip.
import { Term, unitOf } from "./glossary.js";
import { html, useMemo, useState } from "./html.js";
import { currentLanguage, number, t } from "./i18n.js";

/** The place of a row: its file's name and its number. */
export const placeOf = (row) => t("data.place", { source: String(row.source).split("/").pop(), row: row.row });

/** White space is shown where nothing else would be. */
export const visible = (text) => (text === "" ? "∅" : text.trim() === "" ? text.replaceAll(" ", "·").replaceAll("\n", "⏎\n").replaceAll("\t", "→") : text);

/** A heat of -1 to 1: blue below, orange above, without colour at zero. */
export function heat(value, scale) {
  if (value === null || value === undefined || !scale) return {};
  const share = Math.max(-1, Math.min(1, value / scale));
  const colour = share < 0 ? "var(--series-0)" : "var(--series-1)";
  return { background: `color-mix(in srgb, ${colour} ${Math.round(Math.abs(share) * 45)}%, transparent)` };
}

/** The largest size of a value over tokens. */
export const scaleOf = (tokens, of) => Math.max(0, ...tokens.map((token) => Math.abs(token[of] ?? 0)));

/** The least and the largest value over rows of tokens, with zero between them or at an end. */
export function spanOf(rows, of) {
  const values = rows.flatMap((row) => row.tokens.map((token) => token[of])).filter((value) => Number.isFinite(value));
  return [values.reduce((least, value) => Math.min(least, value), 0), values.reduce((most, value) => Math.max(most, value), 0)];
}

/** A value of a token with its unit; the glossary gives some by answer or by token. */
export const measured = (value, of) => [number(value), unitOf(of).split("/")[0].replace(/^1$/, "")].filter(Boolean).join(" ");

/** What the colours of a heat strip mean: full on both sides at the larger end of a span. */
export function HeatScale({ id, span: [least, most] }) {
  const size = Math.max(-least, most);
  const colour = (value) => heat(value, size).background ?? "transparent";
  const ends = [least && -size, most && size];
  return html`<p class="hint heat-scale"><${Term} id=${id} /> <span class="number">${number(ends[0])}</span><span class="ramp" aria-hidden="true" style=${{ background: `linear-gradient(to right, ${colour(ends[0])}, ${least && most ? "transparent, " : ""}${colour(ends[1])})` }}></span><span class="number">${measured(ends[1], id)}</span></p>`;
}

/** What is drawn before a token: where a document of a packed sequence begins. */
const Boundary = ({ of: { number: at, row, tokens } }) => html`<span class="boundary">${t("tokens.document", { at, place: placeOf(row), n: tokens })}</span>`;

/** What is drawn behind a row's last token: that it was cut, or goes on elsewhere. */
const Ending = ({ token }) => html`${token.lost > 0 && html`<span class="cut">${t("tokens.cut", { n: token.lost })}</span>`}${token.continues && html`<span class="cut goes-on">${t("tokens.goes_on")}</span>`}`;

/** A row of tokens; `of` names the value that colours them, or nothing for trained ones. */
export function Tokens({ tokens, of = "", label, scale }) {
  const [picked, pick] = useState(-1);
  const [pointed, point] = useState(-1);
  const most = scale ?? (of ? scaleOf(tokens, of) : 0);
  const key = (event) => {
    const step = { ArrowRight: 1, ArrowLeft: -1 }[event.key];
    if (!step) return;
    event.preventDefault();
    pick((at) => Math.max(0, Math.min(tokens.length - 1, at + step)));
  };
  const indexOf = (event) => Number(event.target.closest?.("[data-at]")?.dataset.at ?? -1);
  const press = (event) => indexOf(event) >= 0 && pick(indexOf(event));
  // Pointing at a token changes the line below, not the thousand tokens above it.
  const drawn = useMemo(
    () =>
      tokens.map((token, i) => {
        const kind = `token${token.trained && !of ? " trained" : ""}${token.special ? " special" : ""}${i === picked ? " picked" : ""}`;
        return html`${token.document && html`<${Boundary} of=${token.document} />`}<span key=${i} class=${kind} data-at=${i} style=${of ? heat(token[of], most) : {}}>${visible(token.text)}</span>${(token.lost > 0 || token.continues) && html`<${Ending} token=${token} />`}`;
      }),
    [tokens, of, most, picked, currentLanguage()],
  );
  const at = pointed >= 0 ? pointed : picked;
  return html`<div class="tokens" tabindex="0" role="group" aria-label=${label} onKeyDown=${key} onClick=${press} onFocus=${() => pick((now) => Math.max(0, now))} onMouseOver=${(event) => point(indexOf(event))} onMouseLeave=${() => point(-1)}>${drawn}</div>
    <p class="hint" aria-live="polite">${tokens[at] ? about(tokens[at], at, of) : ""}</p>`;
}

function about(token, at, of) {
  const first = t("tokens.about", { id: token.id === undefined ? "–" : String(token.id), at: at + 1, text: JSON.stringify(token.text) });
  const trained = token.trained === undefined ? "" : t(token.trained ? "tokens.is_trained" : "tokens.not_trained");
  const value = of && Number.isFinite(token[of]) ? `${t(`g.${of}.name`)}: ${measured(token[of], of)}` : "";
  return [first, trained, value].filter(Boolean).join(" · ");
}
