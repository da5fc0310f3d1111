// What the page asks of the daemon: figures, and notices as they come.

/** The daemon does not know the token, or the token does not open what is needed. */
export class Refused extends Error {}

/** The daemon is not there, ends, or answers what cannot be understood. */
export class Away extends Error {}

/** The daemon is there and cannot do this now. */
export class Busy extends Error {}

const PATIENCE_MS = 15_000;
const SILENCE_MS = 40_000; // a sign of life comes every 15 s

/** Ask one daemon with one token, until `signal` says that nobody wants to know any more. */
export class Daemon {
  #token;
  #signal;

  constructor(token, signal) {
    this.#token = token;
    this.#signal = signal;
  }

  /** Return the JSON object at a path. */
  async ask(path) {
    const answer = await this.#fetch(path, {}, AbortSignal.timeout(PATIENCE_MS));
    try {
      return await answer.json();
    } catch {
      throw new Away("The daemon broke off its answer.");
    }
  }

  /** Yield notices, each with `id`, `event` and `data`, from now on or from the one after `last`. */
  async *notices(last) {
    const silence = new AbortController();
    let timer = setTimeout(() => silence.abort(), SILENCE_MS);
    try {
      const answer = await this.#fetch("v1/events", last ? { "Last-Event-ID": last } : {}, silence.signal);
      yield null; // it listens
      const reader = answer.body.pipeThrough(new TextDecoderStream()).getReader();
      let text = "";
      for (;;) {
        const { done, value } = await reader.read();
        if (done) return;
        clearTimeout(timer);
        timer = setTimeout(() => silence.abort(), SILENCE_MS);
        const frames = (text + value).split("\n\n");
        text = frames.pop();
        for (const frame of frames) {
          const notice = read(frame);
          if (notice) yield notice;
        }
      }
    } catch (error) {
      throw error instanceof Refused || error instanceof Busy ? error : new Away("The notices broke off.");
    } finally {
      clearTimeout(timer);
      silence.abort();
    }
  }

  async #fetch(path, headers, limit) {
    let answer;
    try {
      answer = await fetch(path, {
        headers: { Authorization: `Bearer ${this.#token}`, ...headers },
        cache: "no-store", credentials: "omit", redirect: "error",
        signal: AbortSignal.any([this.#signal, limit]),
      });
    } catch {
      throw new Away("The daemon does not answer.");
    }
    if (answer.ok) return answer;
    const problem = await answer.json().catch(() => ({}));
    const detail = problem.detail ?? `status ${answer.status}`;
    if (answer.status === 401) throw new Refused("The daemon does not know this token.");
    if (answer.status === 403) throw new Refused(`The daemon refuses: ${detail}.`);
    if (answer.status === 503 && problem.type === "urn:kvtcd:error:busy") throw new Busy(detail);
    throw new Away(answer.status === 503 ? "The daemon is about to stop." : `The daemon answered: ${detail}.`);
  }
}

/** Read one event of a stream of Server-Sent Events as the daemon writes them; null for a sign of life. */
export function read(frame) {
  const fields = {};
  for (const line of frame.split("\n")) {
    const colon = line.indexOf(": ");
    if (colon > 0) fields[line.slice(0, colon)] = line.slice(colon + 2);
  }
  return fields.event ? { id: fields.id, event: fields.event, data: JSON.parse(fields.data ?? "{}") } : null;
}
