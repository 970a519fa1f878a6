// The answers of `/api/runs`: which of them a view shows, and by what name.

/** Runs alone: a job of the queue has no curves and no model of its own. */
export const runsAlone = (runs) => runs.filter((run) => run.number === undefined);

/** Runs and jobs, without the stages of a job that is among them. */
export const wholeJobs = (runs) => runs.filter((run) => !run.stage_of?.id);

/** The name of a run; of a stage with that of its job. */
export const runName = ({ name, stage_of: job }) => (job ? `${job.name}/${name}` : name);

/** The id of the run whose model a view of `id` uses: of a job with stages that of its newest stage. */
export const withModel = (id, runs) => runs.find((run) => run.stage_of?.id === id && run.step > 0)?.id ?? id;
