// Train: the list of runs and the queue; one run is in run.js.
import { isReport, post, remove, useGet } from "./api.js";
import { Term } from "./glossary.js";
import { html } from "./html.js";
import { duration, number, percent, t, time } from "./i18n.js";
import { link } from "./router.js";
import { Run } from "./run.js";
import { FindRun, SHOWN, matching, runName, wholeJobs } from "./run_list.js";
import { Action, Loaded, NothingYet, Progress, Status, Table } from "./ui.js";

function Queue() {
  const found = useGet("/api/queue", {}, { every: 3000 });
  const queued = (found.data?.jobs ?? []).filter((job) => job.state === "waiting");
  if (!queued.length) return null;
  return html`<h2>${t("train.queue")}</h2>
    <${Table}
      name=${t("train.queue")}
      head=${["#", t("run.name"), t("run.status"), ""]}
      keys=${queued.map((job) => job.number)}
      rows=${queued.map((job, i) => [
        i + 1,
        html`<a href=${link({ place: "train", run: job.id, tab: "" })}>${job.name}</a>`,
        t("status.queued"),
        html`<${Action} label=${t("train.dequeue")} line=${job.command} onPress=${() => remove(`/api/queue/${job.number}`).then(found.again)} />`,
      ])}
    />`;
}

/** Runs that were put aside, each to be brought back. */
function PutAside({ onBack }) {
  const found = useGet("/api/removed");
  const runs = found.data?.runs ?? [];
  if (!runs.length) return null;
  const back = async (run) => {
    await post(`/api/removed/${encodeURIComponent(run.undo)}/restore`);
    found.again();
    onBack();
  };
  return html`<details><summary>${t("train.aside", { n: runs.length })}</summary>
    <${Table} name=${t("train.aside", { n: runs.length })} head=${[t("run.name"), ""]} keys=${runs.map((run) => run.undo)} rows=${runs.map((run) => [run.name, html`<${Action} label=${t("train.restore")} onPress=${() => back(run)} />`])} />
  </details>`;
}

function Runs({ words }) {
  const found = useGet("/api/runs", {}, { every: 3000 });
  return html`<h1>${t("train.title")}</h1>
    ${!isReport() && html`<${Queue} />`}
    <${Loaded} of=${found}>
      ${({ runs }) => {
        const match = matching(wholeJobs(runs), words).filter((run) => run.status !== "queued");
        return runs.length === 0
          ? html`<${NothingYet} title=${t("train.none")} text=${t("train.none_text")} /><${PutAside} onBack=${found.again} />`
          : html`<${FindRun} words=${words} />
              <${Table}
                name=${t("train.title")}
                head=${[t("run.name"), t("run.status"), t("run.task"), html`<${Term} id="step" />`, html`<${Term} id="loss" />`, html`<${Term} id="held_out_loss" />`, html`<${Term} id="seconds_left" />`, t("run.started")]}
                keys=${match.slice(0, SHOWN).map((run) => run.id)}
                rows=${match.slice(0, SHOWN).map((run) => [
                  html`<a href=${link({ place: "train", run: run.id, tab: "" })}>${runName(run)}</a> ${run.stage && html`<span class="hint">${t("train.stage", { name: run.stage })}</span>`}`,
                  html`<${Status} status=${run.status} />`,
                  run.task ? t(`task.${run.task}`) : "",
                  run.steps ? html`<${Progress} value=${run.step / run.steps} label=${run.name} /> ${run.stage ? t("run.stages_done", { done: run.step, all: run.steps }) : `${number(run.step)}/${number(run.steps)} ${percent(run.step / run.steps, 0)}`}` : "",
                  number(run.loss),
                  number(run.held_out_loss),
                  run.seconds_left ? duration(run.seconds_left) : "",
                  time(run.started),
                ])}
                empty=${t("train.no_match")}
              />
              ${!isReport() && html`<${PutAside} key=${runs.length} onBack=${found.again} />`}
              ${match.length > SHOWN && html`<p class="hint">${t("train.more", { n: match.length - SHOWN })}</p>`}`;
      }}
    <//>`;
}

export default ({ route }) => (route.run ? html`<${Run} key=${route.run} route=${route} />` : html`<${Runs} words=${route.query.find ?? ""} />`);
