// The start of a job, which leads to its run.
import { post } from "./api.js";
import { go } from "./router.js";

export async function startJob({ yaml, name }) {
  const { id } = await post("/api/jobs", { yaml, name });
  go({ place: "train", run: id, tab: "", query: {} });
}
