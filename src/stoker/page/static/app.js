// The page: signs in where a token is asked for, then the rail and the place that the address names.
import { get, onSignedOut, post, useToken } from "./api.js";
import { loadGlossary } from "./glossary.js";
import { html, render, useEffect, useRef, useState } from "./html.js";
import { onTexts, preferred, setLanguage, t } from "./i18n.js";
import { Rail, TopBar } from "./rail.js";
import { here, useRoute } from "./router.js";
import { applyTheme, keepFor, remember, session } from "./session.js";
import { Problem, Waiting } from "./ui.js";

const MODULES = {
  start: () => import("./start.js"),
  data: () => import("./data.js"),
  plan: () => import("./plan.js"),
  train: () => import("./train.js"),
  compare: () => import("./compare.js"),
  use: () => import("./use.js"),
};

const AGAIN = 3000; // ms before a module that did not come is asked for again
const places = {};
const first = get("/api/me").catch((error) => error); // asked before anything is drawn

/** The place of an address; its module is loaded when it is first met. */
function Place({ route, me }) {
  const [error, setError] = useState(null);
  const [, loaded] = useState(0);
  useEffect(() => {
    setError(null);
    if (places[route.place]) return undefined;
    let [timer, isLeft] = [0, false];
    const load = async () => {
      try {
        places[route.place] = (await MODULES[route.place]()).default;
        loaded((n) => n + 1);
      } catch (caught) {
        if (isLeft) return;
        if (!(caught instanceof TypeError)) return void setError(caught);
        setError(new Error(t("app.unreachable"), { cause: caught })); // the server restarts
        timer = setTimeout(load, AGAIN);
      }
    };
    load();
    return () => {
      isLeft = true;
      clearTimeout(timer);
    };
  }, [route.place]);
  const Found = places[route.place];
  if (error && !Found) return html`<${Problem} error=${error} />`;
  return Found ? html`<${Found} key=${route.place} route=${route} me=${me} />` : html`<${Waiting} />`;
}

function SignIn({ onDone }) {
  const [error, set] = useState(null);
  const submit = async (event) => {
    event.preventDefault();
    try {
      const answer = await post("/api/login", { token: new FormData(event.target).get("token").trim() });
      if (answer.csrf) useToken(answer.csrf);
      onDone();
    } catch (caught) {
      set(caught);
    }
  };
  return html`<main class="sign-in" id="main">
    <h1>${t("app.name")}</h1>
    <form onSubmit=${submit}>
      <label for="token">${t("sign_in.token")}</label>
      <input id="token" name="token" type="password" autocomplete="current-password" required />
      <button class="primary">${t("sign_in.enter")}</button>
      <p class="hint">${t("sign_in.hint")}</p>
      <${Problem} error=${error} />
    </form>
  </main>`;
}

function App() {
  const route = useRoute();
  const [me, setMe] = useState(null);
  const [error, setError] = useState(null);
  const [words, setWords] = useState(0);
  const language = route.query.lang;
  const enter = () =>
    get("/api/me").then(met, (caught) => setError(caught));
  const met = (found) => {
    useToken(found.csrf);
    if (found.login) keepFor(found.name);
    setError(null);
    setMe(found);
  };
  useEffect(() => void first.then((found) => (found instanceof Error ? setError(found) : met(found))), []);
  useEffect(() => void onSignedOut(() => setError({ status: 401 })), []);
  useEffect(() => void onTexts(() => setWords((n) => n + 1)), []);
  useEffect(() => void setLanguage(language || preferred()).then(() => setWords((n) => n + 1)), [language]);
  useEffect(() => {
    document.title = `${t(`place.${route.place}`)}${route.run ? ` · ${route.run}` : ""} · ${t("app.name")}`;
  }, [route.place, route.run, words]);
  useEffect(() => {
    if (me && route.run && (route.place === "train" || route.place === "use")) remember({ run: route.run.split(",")[0] });
  }, [me?.name, route.place, route.run]);
  const isFirst = useRef(true);
  useEffect(() => {
    if (me && !isFirst.current && document.activeElement === document.body) document.getElementById("main")?.focus({ preventScroll: true }); // what had the focus is gone
    if (me) isFirst.current = false;
  }, [me?.name, route.place, route.run, route.tab]);
  if (error?.status === 401) return html`<${SignIn} onDone=${enter} />`;
  if (!me) return html`<main id="main">${error ? html`<${Problem} error=${error} />` : html`<${Waiting} />`}</main>`;
  return html`<a class="skip" href="#main" onClick=${skip}>${t("app.skip")}</a>
    <div class="shell">
      <${Rail} route=${route} />
      <div class="body">
        <${TopBar} route=${route} me=${me} />
        <main id="main" tabindex="-1"><${Place} route=${route} me=${me} /></main>
      </div>
    </div>`;
}

function skip(event) {
  event.preventDefault(); // the address stays: it is the view
  document.getElementById("main").focus();
}

async function begin() {
  applyTheme(session().theme);
  MODULES[here().place]().catch(() => {}); // on its way while the words are; `Place` says where it fails
  loadGlossary();
  await setLanguage(here().query.lang || preferred());
  const place = document.getElementById("app");
  place.replaceChildren(); // the frame that was painted first, which `render` would leave beside the page
  render(html`<${App} />`, place);
}

begin();
