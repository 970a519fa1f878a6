// Tokens as a person reads them: what is trained on a tint, special tokens in small capitals, cuts and ends of documents
// as rules; a press or the arrow keys pick one and say its id and position. Values by token are shown as a heat strip.
import { html, useState } from "./html.js";
import { number, t } from "./i18n.js";

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

/** A row of tokens; `of` names the value that colours them, or nothing for trained ones. */
export function Tokens({ tokens, of = "", label, scale }) {
  const [picked, pick] = useState(-1);
  const most = scale ?? (of ? scaleOf(tokens, of) : 0);
  const key = (event) => {
    const step = { ArrowRight: 1, ArrowLeft: -1 }[event.key];
    if (!step) return;
    event.preventDefault();
    pick((at) => Math.max(0, Math.min(tokens.length - 1, at + step)));
  };
  const press = (event) => {
    const at = event.target.closest("[data-at]");
    if (at) pick(Number(at.dataset.at));
  };
  const one = tokens[picked];
  return html`<div class="tokens" tabindex="0" role="group" aria-label=${label} onKeyDown=${key} onClick=${press}>
      ${tokens.map((token, i) => {
        const kind = `token${token.trained && !of ? " trained" : ""}${token.special ? " special" : ""}${i === picked ? " picked" : ""}`;
        return html`${token.boundary ? html`<span class="boundary"></span>` : null}<span key=${i} class=${kind} data-at=${i} style=${of ? heat(token[of], most) : {}}>${visible(token.text)}</span>${token.cut ? html`<span class="cut" role="img" aria-label=${t("tokens.cut")}></span>` : null}`;
      })}
    </div>
    <p class="hint" aria-live="polite">${one ? about(one, picked, of) : ""}</p>`;
}

function about(token, at, of) {
  const first = t("tokens.about", { id: token.id === undefined ? "–" : String(token.id), at: at + 1, text: JSON.stringify(token.text) });
  const trained = token.trained === undefined ? "" : t(token.trained ? "tokens.is_trained" : "tokens.not_trained");
  const value = of ? `${t(`g.${of}.name`)}: ${number(token[of])}` : "";
  const loss = token.loss === undefined || token.loss === null ? "" : `${t("g.loss.name")}: ${number(token.loss)}`;
  return [first, trained, value, loss].filter(Boolean).join(" · ");
}

