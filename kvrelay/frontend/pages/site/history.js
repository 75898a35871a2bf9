// What the ticks of the feed say beyond themselves: rates, quantiles and the points of the charts.
// Counters come as they are; all rates are differences between now and a few ticks ago.

const WINDOW = 3; // ticks
const KEPT_S = 300;
const STORE = "kvrelay-points";
const RANK = { encode: 0, prefill: 1, whole: 2, decode: 2 };

export class History {
  constructor() {
    this.ticks = [];
    this.points = restored();
    this.gone = new Map(); // workers that vanished, by id
    addEventListener("pagehide", () => {
      try {
        sessionStorage.setItem(STORE, JSON.stringify(this.points));
      } catch { /* the tab has no room for it */ }
    });
  }

  // Another server, or the same one after a restart: its counters begin anew.
  take(tick) {
    const last = this.ticks[this.ticks.length - 1];
    if (last && last.cluster.router !== tick.cluster.router) this.ticks = [];
    this.noteGone(last, tick);
    this.ticks.push(tick);
    if (this.ticks.length > WINDOW + 1) this.ticks.shift();
    if (this.ticks.length > 1) this.points.push(this.point());
    while (this.points.length && this.points[0].at < tick.at - KEPT_S) this.points.shift();
  }

  get now() { return this.ticks[this.ticks.length - 1]; }

  get seconds() { return Math.max(0.001, this.now.at - this.ticks[0].at); }

  // A worker that is not listed any more stays on the page for a minute: red, unless it had said that it leaves.
  noteGone(last, tick) {
    const here = new Set(tick.cluster.workers.map((worker) => worker.id));
    for (const worker of last ? last.cluster.workers : []) {
      if (here.has(worker.id)) continue;
      const quickly = worker.state === "ready" && tick.counters.workers_left > last.counters.workers_left; // between two ticks
      const left = quickly || worker.state === "draining" || worker.state === "starting";
      this.gone.set(worker.id, { ...worker, state: left ? "left" : "gone", problem: left ? "it has left" : "it is lost", goneAt: tick.at, running: 0, waiting: 0 });
    }
    for (const [id, worker] of this.gone) if (here.has(id) || tick.at - worker.goneAt > 60) this.gone.delete(id);
  }

  workers() {
    const order = (worker) => `${RANK[worker.role]} ${worker.role} ${worker.id}`;
    return [...this.now.cluster.workers, ...this.gone.values()].sort((a, b) => (order(a) < order(b) ? -1 : 1));
  }

  before(id) { return this.ticks[0].cluster.workers.find((worker) => worker.id === id); }

  perSecond(worker, value) {
    const before = this.before(worker.id);
    return before ? Math.max(0, value(worker) - value(before)) / this.seconds : 0;
  }

  // [{from, to, total, perSecond}]: bytes that moved between two workers. The side that moves them counts them.
  flows() {
    const roles = new Map(this.workers().map((worker) => [worker.id, worker.role]));
    const flows = new Map();
    for (const worker of this.now.cluster.workers) {
      for (const [peer, total] of Object.entries(movedByPeer(worker))) {
        if (!roles.has(peer)) continue;
        const forth = RANK[worker.role] < RANK[roles.get(peer)];
        const [from, to] = forth ? [worker.id, peer] : [peer, worker.id];
        const before = this.before(worker.id);
        const moved = before ? Math.max(0, total - (movedByPeer(before)[peer] || 0)) : 0;
        const flow = flows.get(`${from} ${to}`) || { from, to, total: 0, perSecond: 0 };
        flow.total += total;
        flow.perSecond += moved / this.seconds;
        flows.set(`${from} ${to}`, flow);
      }
    }
    return [...flows.values()];
  }

  sum(tick, name) {
    return tick.cluster.workers.reduce((all, worker) => all + worker[name], 0);
  }

  grown(name) {
    return this.now.cluster.workers.reduce((all, worker) => {
      const before = this.before(worker.id);
      return all + (before ? Math.max(0, worker[name] - before[name]) : 0);
    }, 0);
  }

  counted(name) { return Math.max(0, this.now.counters[name] - this.ticks[0].counters[name]) / this.seconds; }

  quantile(name, share) {
    const before = new Map(this.ticks[0].histograms[name]);
    return quantile(this.now.histograms[name].map(([bound, count]) => [Number(bound.replace("+Inf", "Infinity")), count - (before.get(bound) || 0)]), share);
  }

  point() {
    const computed = this.grown("prompt_tokens"), cached = this.grown("cached_tokens");
    return {
      at: this.now.at,
      ttft50: this.quantile("ttft", 0.5), ttft95: this.quantile("ttft", 0.95),
      token50: this.quantile("inter_token", 0.5), token95: this.quantile("inter_token", 0.95),
      waiting: this.sum(this.now, "waiting"), running: this.sum(this.now, "running"),
      output: this.grown("output_tokens") / this.seconds, prompt: computed / this.seconds,
      hits: computed + cached > 0 ? (100 * cached) / (computed + cached) : null,
    };
  }
}

// From cumulative counts [[bound, count]]: where in its bucket the quantile lies, as if its bucket were filled evenly.
export function quantile(counts, share) {
  const all = counts.length ? counts[counts.length - 1][1] : 0;
  if (all <= 0) return null;
  let low = 0, below = 0;
  for (const [bound, count] of counts) {
    if (count >= share * all) {
      if (bound === Infinity) return low;
      return low + ((bound - low) * (share * all - below)) / (count - below || 1);
    }
    [low, below] = [bound, count];
  }
  return low;
}

// Bytes of KV and embeddings, by the worker at the other end, as far as this one moved them.
const movedByPeer = ({ transfers, images }) => ({ ...transfers.by_peer, ...images.by_peer });

function restored() {
  try {
    return JSON.parse(sessionStorage.getItem(STORE) || "[]");
  } catch {
    return [];
  }
}
