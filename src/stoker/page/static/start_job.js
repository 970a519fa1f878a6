// The start of a job, which leads to its run.
import { post } from "./api.js";
import { go, here } from "./router.js";
import { remember } from "./session.js";

/** Starts a job, given as a value or a promise, and goes to its run unless the user has opened another view meanwhile. */
export async function startJob(wanted) {
  const from = here();
  const job = await wanted;
  if (!job) return;
  const { id } = await post("/api/jobs", { yaml: job.yaml, name: job.name });
  const now = here();
  if (now.place === from.place && now.run === from.run) go({ place: "train", run: id, tab: "", query: {} });
  else remember({ run: id }); // Train leads there
}
