// The job at hand, twice: a form of the schema's keys and the YAML itself. Both edit the same text; every change is checked.
import { post, useGet } from "./api.js";
import { html, useEffect, useRef, useState } from "./html.js";
import { spoken, t } from "./i18n.js";
import { startLine, submitLine } from "./commands.js";
import { Doing } from "./doing.js";
import { JobForm, hasStages } from "./job_form.js";
import { link } from "./router.js";
import { remember, rememberJob, replaceJob, session, useSession } from "./session.js";
import { startJob } from "./start_job.js";
import { Action, Field, FolderName, NothingYet, Problem, Spoken, problemPlace, useLater } from "./ui.js";

const WAIT = 250; // ms after the last key

/** The job's text with line numbers; lines with a problem are marked, and the cursor can be put on one. */
export function Editor({ id, text, problems, onInput }) {
  const area = useRef(null);
  const gutter = useRef(null);
  const lines = text.split("\n").length;
  const wrong = new Map(problems.filter((problem) => problem.file === "job.yaml").map((problem) => [problem.line, spoken(problem).message]));
  const scroll = ({ currentTarget }) => gutter.current && (gutter.current.scrollTop = currentTarget.scrollTop); // it may come when the editor is gone
  return html`<div class="editor">
    <div class="gutter" ref=${gutter} aria-hidden="true">
      ${Array.from({ length: lines }, (_, i) => html`<div key=${i} class=${wrong.has(i + 1) ? "wrong" : ""} title=${wrong.get(i + 1) ?? ""}>${wrong.has(i + 1) ? "▸ " : ""}${i + 1}</div>`)}
    </div>
    <textarea
      id=${id}
      ref=${area}
      class="code"
      spellcheck=${false}
      autocapitalize="off"
      wrap="off"
      aria-label=${t("job.yaml")}
      aria-invalid=${problems.length > 0}
      aria-describedby=${`${id}-problems`}
      value=${text}
      onInput=${(event) => onInput(event.target.value)}
      onScroll=${scroll}
    ></textarea>
  </div>`;
}

/** Puts the cursor on a line of the editor. */
export function jump(id, line, column = 1) {
  const area = document.getElementById(id);
  const start = area.value.split("\n").slice(0, line - 1).join("\n").length + (line > 1 ? 1 : 0) + Math.max(0, column - 1);
  area.focus();
  area.setSelectionRange(start, start);
  area.scrollTop = Math.max(0, (line - 5) * 20);
}

/** What `check` says of a text: problems, values with their reasons, the command. The answer to an older text is dropped. */
export function useCheck(yaml) {
  const [state, set] = useState({ problems: [], resolved: {}, command: "", checked: null, error: null });
  const asked = useRef("");
  useLater(
    async () => {
      if (!yaml) return;
      asked.current = yaml;
      try {
        const found = await post("/api/check", { yaml });
        if (asked.current !== yaml) return;
        const isWhole = found.resolved && Object.keys(found.resolved).length > 0;
        set((old) => ({ ...found, problems: found.problems ?? [], resolved: isWhole ? found.resolved : old.resolved, checked: yaml, error: null }));
      } catch (error) {
        set((old) => ({ ...old, checked: yaml, error }));
      }
    },
    WAIT,
    [yaml],
  );
  return state;
}

/**
 * Sets a key of the job at hand. Where its text changes while the server answers, the key is set in the new text; where
 * another job takes its place, nothing.
 */
export async function setKey(key, value) {
  const former = session().previous?.yaml;
  for (;;) {
    const text = session().yaml;
    const { yaml } = await post("/api/edit", { yaml: text, edits: [{ key, value }] });
    if (session().previous?.yaml !== former) return;
    if (session().yaml === text) return void rememberJob({ yaml });
  }
}

/** Starts the job elsewhere: over ssh, by Slurm, on Ray or on Kubernetes; first what would be sent. */
function Elsewhere({ state, me, isBlocked, settled }) {
  const [on, set] = useState("");
  const [id, started] = useState("");
  const targets = useGet("/api/targets");
  const submit = (dry) => async () => {
    const job = await settled();
    if (!job) return;
    const options = { on, name: job.name, ...(dry ? { dry_run: true } : {}) };
    started((await post("/api/actions", { verb: "submit", yaml: job.yaml, options })).id);
  };
  const isWithout = isBlocked || !on || me?.role !== "admin";
  const reason = me?.role === "admin" ? (on ? "" : t("job.no_target")) : t("job.not_admin");
  return html`<details><summary>${t("job.elsewhere")}</summary>
    <p class="hint">${t("job.elsewhere_about")}</p>
    <${Field} id="target" label=${t("job.target")}>
      <input id="target" list="targets" value=${on} onInput=${(event) => set(event.target.value.trim())} />
      <datalist id="targets">${(targets.data?.targets ?? []).map((target) => html`<option key=${target.name} value=${target.name}>${target.kind}</option>`)}</datalist>
    <//>
    <div class="actions">
      <${Action} label=${t("job.dry_run")} line=${submitLine(state.name, on, true)} disabled=${isWithout} reason=${reason} onPress=${submit(true)} />
      <${Action} label=${t("job.submit")} line=${submitLine(state.name, on)} disabled=${isWithout} onPress=${submit(false)} />
    </div>
    <${Doing} id=${id} />
  </details>`;
}

/** The page of the job at hand; with `line` the cursor is on that line of its text. */
export function Job({ me, line }) {
  const state = useSession();
  const schema = useGet("/api/schema");
  const isOnlySeen = me?.role === "see"; // this role has no check, which the form takes its values from
  const check = useCheck(isOnlySeen ? "" : state.yaml);
  const [error, setError] = useState(null);
  useEffect(() => {
    if (line > 0 && document.getElementById("yaml")) jump("yaml", line);
  }, [line]);
  const queue = useRef(Promise.resolve(true)); // the edits that the server has not answered, and whether the last one succeeded
  if (!state.yaml) {
    return html`<${NothingYet} title=${t("job.none")} text=${t("job.none_text")} />`;
  }
  if (isOnlySeen) {
    return html`<h1>${t("job.title", { name: state.name })}</h1>
      <${Action} id="start-training" label=${t("job.start")} kind="primary" disabled=${true} reason=${t("job.only_see")} />
      <pre class="log" tabindex="0" aria-label=${t("job.yaml")}>${state.yaml}</pre>`;
  }
  const edit = (yaml) => rememberJob({ yaml });
  const change = (key, value) => {
    const last = queue.current.then(async () => {
      try {
        await setKey(key, value);
        setError(null);
        return true;
      } catch (caught) {
        setError(caught);
        return false;
      }
    });
    queue.current = last;
    last.then(() => queue.current === last && (queue.current = Promise.resolve(true)));
    return last;
  };
  const settled = async () => ((await queue.current) ? session() : null); // null where an edit failed, whose error is shown
  const start = () => startJob(settled());
  const stated = check.problems.filter((problem) => !problem.repeats); // a problem of several keys once; each of its fields has it
  const isBlocked = check.checked === null || check.problems.length > 0; // a text changed since is checked by its start
  return html`<h1>${t("job.title", { name: state.name })}</h1>
    <div class="actions">
      <${Action} id="start-training" label=${t("job.start")} kind="primary" line=${startLine(state.name)} onPress=${start} disabled=${isBlocked} reason=${check.problems.length ? t("job.has_problems", { n: stated.length }) : ""} />
      <a class="button" href=${link({ place: "data", run: "" })}>${t("job.see_data")}</a>
      <a class="button" href=${link({ place: "plan", run: "" })}>${t("job.see_plan")}</a>
    </div>
    ${state.previous && html`<p><button type="button" class="quiet" onClick=${() => replaceJob(state.previous)}>${t("job.bring_back", { name: state.previous.name })}</button></p>`}
    <${Problem} error=${error ?? check.error} />
    <${Elsewhere} state=${state} me=${me} isBlocked=${isBlocked} settled=${settled} />
    <div class="split">
      <section aria-labelledby="form-title">
        <h2 id="form-title">${t("job.form")}</h2>
        <${FolderName} id="job-name" label=${t("job.name")} value=${state.name} onChange=${(name) => remember({ name })} />
        <${JobForm} schema=${schema} check=${check} yaml=${state.yaml} onChange=${change} />
      </section>
      <section aria-labelledby="yaml-title">
        <h2 id="yaml-title">${t("job.yaml")}</h2>
        <${Editor} id="yaml" text=${state.yaml} problems=${check.problems} onInput=${edit} />
        <div id="yaml-problems" aria-live="polite">
          ${stated.map(
            (problem) => html`<div class="problem" key=${`${problem.line}:${problem.message}`}>
              ${problem.file === "job.yaml" && problem.line > 0 && html`<button type="button" class="quiet" onClick=${() => jump("yaml", problem.line, problem.column)}>${problemPlace(problem)}</button>${" "}`}
              <${Spoken} error=${problem} place=${problem.file === "job.yaml" ? "" : problemPlace(problem)} />
            </div>`,
          )}
          ${check.checked === state.yaml && !check.problems.length && !check.error && html`<p class="hint">${t("job.all_right")} ${hasStages(state.yaml) ? "" : state.audited ? t("job.audited") : html`<a href=${link({ place: "data", run: "", tab: "audit" })}>${t("job.not_audited")}</a>`}</p>`}
        </div>
      </section>
    </div>`;
}
