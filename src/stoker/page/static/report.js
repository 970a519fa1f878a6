// A report: the views of one run or several, from the data inside this file; nothing is asked of a server.
import { useAnswers } from "./api.js";
import { setGlossary } from "./glossary.js";
import { html, render, useEffect, useState } from "./html.js";
import { LANGUAGES, currentLanguage, preferred, t, time, useTable } from "./i18n.js";
import { address, here, useRoute } from "./router.js";

const inside = JSON.parse(document.getElementById("report").textContent);
useAnswers(inside.answers);
setGlossary(inside.glossary);

const speak = (name) => useTable(name, inside.messages[name]);

function Report({ Run, Compare }) {
  const found = useRoute();
  const [, again] = useState(0);
  const ids = inside.answers["/api/runs"].runs.map((run) => run.id);
  const place = found.run ? found.place : ids.length > 1 ? "compare" : "train";
  const route = { ...found, place, run: found.run || ids.join(",") };
  useEffect(() => {
    speak(found.query.lang || inside.language || preferred());
    document.title = `${ids.join(", ")} · ${t("report.title")}`;
    again((n) => n + 1);
  }, [found.query.lang]);
  return html`<div class="body">
    <header class="top">
      <strong>${t("app.name")}</strong><span class="who">${t("report.made", { time: time(inside.time) })}</span><span class="grow"></span>
      ${ids.length > 1 && [["compare", ids.join(",")], ...ids.map((id) => ["train", id])].map(([to, run]) => html`<a key=${to + run} href=${address({ place: to, run, query: { lang: route.query.lang } })}>${to === "compare" ? t("place.compare") : inside.answers[`/api/runs/${run}`]?.name}</a>`)}
      <span class="languages">${LANGUAGES.map((name) => html`<a key=${name} lang=${name} href=${address({ ...route, query: { ...route.query, lang: name } })} aria-current=${name === currentLanguage() ? "true" : undefined}>${t(`language.${name}`)}</a>`)}</span>
    </header>
    <main id="main">${place === "compare" ? html`<${Compare} route=${route} />` : html`<${Run} key=${route.run} route=${route} />`}</main>
  </div>`;
}

async function begin() {
  speak(here().query.lang || inside.language || preferred());
  const [{ Run }, { default: Compare }] = await Promise.all([import("./run.js"), import("./compare.js")]);
  render(html`<${Report} Run=${Run} Compare=${Compare} />`, document.getElementById("app"));
}

begin();
