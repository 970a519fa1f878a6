// The navigation: six places, which of them are done, and what blocks the others; above it language, theme and user.
import { post, useGet } from "./api.js";
import { html } from "./html.js";
import { LANGUAGES, currentLanguage, t } from "./i18n.js";
import { PLACES, link } from "./router.js";
import { applyTheme, forget, remember, useSession } from "./session.js";

const SIGNS = { start: "M4 11 12 4l8 7v9h-5v-6H9v6H4z", data: "M4 5h16v4H4zm0 6h16v4H4zm0 6h10v3H4z" };
Object.assign(SIGNS, {
  plan: "M4 20V10h4v10zm6 0V4h4v16zm6 0v-7h4v7z",
  train: "M3 18 9 9l4 5 4-9 4 6v7z",
  compare: "M4 4h7v16H4zm9 4h7v12h-7z",
  use: "M4 4h16v12H10l-6 4z",
});

const EVERY = 10_000; // ms between two looks for a first run

/** How far the job at hand has come at a place: done, blocked (with the reason's key) or open. */
export function standing(place, state, hasRuns) {
  if (place === "start") return { done: Boolean(state.yaml) };
  if (place === "data") return { done: Boolean(state.yaml) && state.audited };
  if (place === "plan") return state.yaml ? { done: state.planned } : { blocked: "rail.no_job" };
  if (place === "train") return { done: Boolean(state.run) };
  return hasRuns ? { done: false } : { blocked: "rail.no_run" };
}

/** Where a place of the rail leads: to the last run; from a run to the list of all. */
export const target = (place, state, route) => ({ place, run: state.run && (place === "use" || (place === "train" && !(route.place === "train" && route.run))) ? state.run : "" });

export function Rail({ route }) {
  const state = useSession();
  const { data } = useGet(state.run ? "" : "/api/runs", {}, { every: EVERY });
  const hasRuns = Boolean(state.run) || data?.runs.length !== 0;
  return html`<nav class="rail" aria-label=${t("rail.name")}>
    <span class="brand" aria-hidden="true">${t("app.name")}</span>
    <ul>
      ${PLACES.map((place) => {
        const { done, blocked } = standing(place, state, hasRuns);
        const words = done ? t("rail.done") : blocked ? t(blocked) : "";
        return html`<li key=${place}>
          <a href=${link(target(place, state, route))} aria-current=${route.place === place ? "page" : undefined} class=${done ? "done" : ""} title=${words}>
            <svg viewBox="0 0 24 24" width="20" height="20" aria-hidden="true"><path d=${SIGNS[place]} /></svg>
            <span>${t(`place.${place}`)}</span>
            ${words && html`<span class="hidden">, ${words}</span>`}
          </a>
        </li>`;
      })}
    </ul>
  </nav>`;
}

export function TopBar({ route, me }) {
  const state = useSession();
  const theme = (event) => {
    remember({ theme: event.target.value });
    applyTheme(event.target.value);
  };
  const who = me.users && t("app.who", { name: me.name, role: t(`role.${me.role}`) });
  const leave = () => post("/api/logout").then(() => (forget(), location.reload()));
  return html`<header class="top">
    <span class="grow"></span>
    <span class="who">${who && me.role === "admin" ? html`<a href=${link({ place: "start", run: "users", tab: "" })}>${who}</a>` : who}</span>
    <span class="languages" role="group" aria-label=${t("app.language")}>
      ${LANGUAGES.map(
        (name) => html`<a key=${name} lang=${name} href=${link({ place: route.place, run: route.run, tab: route.tab, query: { ...route.query, lang: name } })} aria-current=${name === currentLanguage() ? "true" : undefined}>${t(`language.${name}`)}</a>`,
      )}
    </span>
    <label class="hidden" for="theme">${t("app.theme")}</label>
    <select id="theme" value=${state.theme} onChange=${theme}>
      ${["auto", "light", "dark"].map((name) => html`<option key=${name} value=${name}>${t(`theme.${name}`)}</option>`)}
    </select>
    ${me.login && html`<button type="button" class="quiet" onClick=${leave}>${t("app.leave")}</button>`}
  </header>`;
}
