// The command lines of actions on a run, as they are before the server has run them; its answer's own line is shown after.

/** A word as a shell needs it. */
export const quoted = (word) => (/^[\w@%+=:,./-]+$/.test(word) ? word : `'${String(word).replaceAll("'", "'\\''")}'`);

const line = (...words) => ["stoker", ...words.filter((word) => word !== "" && word !== undefined && word !== null).map(quoted)].join(" ");

export const startLine = (name) => line("train", `${name}.yaml`, `output=runs/${name}`);
export const submitLine = (name, on, dry = false) => line("submit", `${name}.yaml`, "--on", on || "TARGET", dry ? "--dry-run" : "");
export const stopLine = (run) => line("stop", run.folder);
export const resumeLine = (run) => line("train", `${run.folder}/job.yaml`);
export const forkLine = (run, output) => line("train", `${run.folder}/job.yaml`, `output=${output}`);
export const chatLine = (run, adapter = true) => line("chat", run.folder, adapter ? "" : "--compare");
export const exportLine = (run, format, to) => line("export", run.folder, "--format", format, "--to", to);
export const evalLine = (run, options = []) => line("eval", run.folder, ...options);
export const serveLine = (run) => line("serve", run.folder);
export const logsLine = (run, rank) => line("logs", run.folder, "--rank", String(rank));
export const reportLine = (run) => line("report", run.folder, "-o", `${run.name}.html`);
export const rolloutsLine = (run, step) => line("rollouts", run.folder, "--step", String(step));
