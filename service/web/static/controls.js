// What a person can do to a job: scale it and cancel it. The API decides what is possible; its refusals are shown whole.

import { get, jobPath, post, Problem } from "./api.js";
import { byId, fill, h } from "./dom.js";
import { duration } from "./format.js";
import { isOver, showProblem } from "./parts.js";

export class Controls {
  /** `onChange` is called whenever the job may have changed by what was done here. */
  constructor(job, onChange) {
    this.job = job;
    this.onChange = onChange;
    this.replicaSize = 1;
    this.touched = false;
    const wanted = byId("workers-wanted");
    wanted.addEventListener("input", () => { this.touched = true; });
    byId("fewer").addEventListener("click", () => this.step(-1));
    byId("more-workers").addEventListener("click", () => this.step(1));
    byId("controls").addEventListener("submit", (event) => { event.preventDefault(); this.scale(); });
    byId("cancel").addEventListener("click", () => byId("confirm").showModal());
    byId("confirm").addEventListener("close", (event) => {
      if (event.target.returnValue === "cancel") this.cancel();
      event.target.returnValue = "";
    });
  }

  show(job) {
    const { tensor, pipeline } = job.spec?.parallelism ?? { tensor: 1, pipeline: 1 };  // null: it cannot be read
    this.replicaSize = tensor * pipeline;
    if (!this.touched) byId("workers-wanted").value = job.workers.desired;
    byId("controls").hidden = isOver(job.state);
    byId("cancel").disabled = job.state === "CANCELLING";
    byId("scale").title = `${job.workers.min} to ${job.workers.max} workers, in replicas of ${this.replicaSize}`;
  }

  step(direction) {
    const wanted = byId("workers-wanted");
    wanted.value = Math.max(this.replicaSize, Number(wanted.value) + direction * this.replicaSize);
    this.touched = true;
  }

  async scale() {
    if (await this.send("scale", { workers: Number(byId("workers-wanted").value) })) this.touched = false;
  }

  cancel() {
    return this.send("cancel", { force: byId("force").checked });
  }

  /** Sends a command, then shows the phases of the operation until it is over. False when it was refused. */
  async send(command, body) {
    for (const button of byId("controls").querySelectorAll("button")) button.disabled = true;
    try {
      const operation = await post(jobPath(this.job, `/${command}`), body);
      showProblem(byId("control-problem"), null);
      this.follow(operation);
      return true;
    } catch (error) {
      if (!(error instanceof Problem)) throw error;
      showProblem(byId("control-problem"), error);
      return false;
    } finally {
      for (const button of byId("controls").querySelectorAll("button")) button.disabled = false;
      this.onChange();
    }
  }

  async follow(operation) {
    const turn = this.following = operation.id;
    for (let seen = operation; this.following === turn;) {
      showOperation(seen);
      if (seen.state === "DONE" || seen.state === "FAILED") return;
      await new Promise((resolve) => { setTimeout(resolve, 500); });
      try {
        seen = await get(`/v1/operations/${encodeURIComponent(operation.id)}`);
      } catch (error) {
        if (!(error instanceof Problem)) throw error; // an unreachable control plane comes back
        if (error.code !== "unreachable") { showProblem(byId("control-problem"), error); return; }
      }
    }
  }
}

function showOperation(operation) {
  const element = byId("operation");
  element.hidden = false;
  element.dataset.state = operation.state;
  const what = operation.kind === "scale" ? scaling(operation.request) : "Cancel";
  fill(element,
    h("strong", {}, what), h("span", { class: "quiet" }, operation.message ?? operation.state.toLowerCase()),
    h("ol", { class: "phases" }, operation.phases.map((phase) => h("li", {}, phase.name,
      h("span", { class: "quiet" }, phase.seconds === null ? " …" : ` ${duration(phase.seconds)}`)))));
}

function scaling({ workers, min, max }) {
  return workers ? `Scale to ${workers} workers` : `Scale between ${min ?? "the least"} and ${max ?? "the most"} workers`;
}
