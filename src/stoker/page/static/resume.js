// Going on with a run under changed keys: a field for them, and which of them the run accepts.
import { post, runPath } from "./api.js";
import { resumeLine } from "./commands.js";
import { html, useRef, useState } from "./html.js";
import { t } from "./i18n.js";
import { Action, Field, Problem, Waiting, useLater } from "./ui.js";

const WAIT = 600; // ms after the last key

/** The overrides of a text, one a line. */
export const changesIn = (text) => text.split("\n").map((line) => line.trim()).filter(Boolean);

/** A changed key with both values. */
export const changeText = ({ key, before, after }) => `${key}: ${before ?? t("resume.not_set")} → ${after ?? t("resume.not_set")}`;

const Changes = ({ title, changes }) =>
  changes.length > 0 && html`<p>${title}</p><ul>${changes.map((change) => html`<li key=${change.key}><code>${changeText(change)}</code></li>`)}</ul>`;

/** Whether a run can go on with changes: it has ended, and is neither a job of the queue nor a stage of one. */
export const canChange = (run, isRunning) => !isRunning && run.number === undefined && !run.stage_of?.id;

/** A field for changed keys and a button that goes on with them; `onPress` gets the changes. */
export function ResumeWithChanges({ run, onPress }) {
  const [text, set] = useState("");
  const [found, setFound] = useState({ text: "", problems: [], accepted: [], refused: [], error: null });
  const asked = useRef("");
  useLater(
    async () => {
      const changes = changesIn(text);
      asked.current = text;
      if (!changes.length) return;
      const answer = await post(`${runPath(run.id)}/resume-check`, { changes }).catch((error) => ({ problems: [], accepted: [], refused: [], error }));
      if (asked.current === text) setFound({ error: null, ...answer, text });
    },
    WAIT,
    [text, run.id],
  );
  const changes = changesIn(text);
  const isChecked = changes.length > 0 && found.text === text;
  const isAccepted = isChecked && !found.error && !found.problems.length && !found.refused.length;
  return html`<details id="resume-changes">
    <summary>${t("resume.title")}</summary>
    <${Field} id="changes" label=${t("resume.changes")} hint=${t("resume.hint")}>
      <textarea id="changes" class="code" rows="3" spellcheck=${false} autocapitalize="off" aria-describedby="changes-hint changes-found" value=${text} onInput=${(event) => set(event.target.value)}></textarea>
    <//>
    <div id="changes-found" aria-live="polite">
      ${changes.length > 0 && !isChecked && html`<${Waiting} what=${t("job.checking")} />`}
      ${isChecked &&
      html`<${Problem} error=${found.error} />
        ${found.problems.map((problem) => html`<${Problem} key=${problem.message} error=${problem} />`)}
        <${Changes} title=${t("resume.accepted")} changes=${found.accepted} />
        <${Changes} title=${t("resume.refused")} changes=${found.refused} />
        ${isAccepted && !found.accepted.length && html`<p class="hint">${t("resume.same")}</p>`}`}
    </div>
    <${Action} id="resume-with" label=${t("resume.go")} kind="primary" line=${resumeLine(run, changes)} disabled=${!isAccepted} onPress=${() => onPress(changes)} />
  </details>`;
}
