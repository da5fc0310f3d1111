// The page: a token, then the daemon's figures, asked for anew when something happens, and at least every few seconds.

import { Away, Busy, Daemon, Refused } from "./daemon.js";
import { clock } from "./dom.js";
import * as view from "./view.js";

const EVERY_MS = 5_000;
const SOONEST_MS = 500; // after a notice: they come in swarms
const HISTORY_MS = 10_000;
const LONGEST_MS = 10_000; // between two tries
const LATEST = 20;

const at = (id) => document.getElementById(id);
let ending = null; // of what asks and listens now; null while nothing does
let seen = null; // token, and what is known of the daemon so far; null while locked

/** Say something that matters; it is read out, so it is only said when it changes. */
function say(text, alarm = false) {
  const status = at("status");
  if (status.textContent !== text) status.textContent = text;
  status.classList.toggle("alarm", alarm);
  document.title = alarm ? `kvtcd: ${text}` : "kvtcd";
}

/** Take a token out of the address, where neither history nor a screenshot is to keep it. */
function tokenFromAddress() {
  const found = location.hash.slice(1);
  if (!found || at(found)) return null; // a link within the page
  history.replaceState(null, "", location.pathname + location.search);
  return found;
}

/** Ask for a token. */
function lock(why, alarm = false) {
  stop();
  seen = null;
  at("figures").hidden = true;
  at("unlock").hidden = false;
  at("why").textContent = alarm ? "Enter another one." : why;
  say(alarm ? why : "", alarm);
  at("token").value = "";
  at("token").focus();
}

/** Show what the daemon says to whoever has this token. */
function open(token) {
  stop();
  at("unlock").hidden = true;
  if (!/^[\x21-\x7e]+$/.test(token)) {
    lock("That is no token.", true);
    return;
  }
  say("Loading…");
  seen = { token, boot: null, away: false, figures: null, notice: null, latest: [] };
  start();
}

/** Ask and listen, if there is a token and somebody looks. */
function start() {
  if (seen === null || document.hidden || ending) return;
  ending = new AbortController();
  const { signal } = ending;
  const daemon = new Daemon(seen.token, signal);
  const news = new Bell();
  follow(seen, daemon, news, signal);
  listen(seen, daemon, news, signal);
}

/** Hold no connection: a browser has six of them for all pages of one daemon, those in the background too. */
function stop() {
  ending?.abort();
  ending = null;
}

/** Wakes who waits. */
class Bell {
  #ring = () => {};

  ring() {
    this.#ring();
  }

  async wait(milliseconds) {
    await new Promise((resolve) => {
      this.#ring = resolve;
      setTimeout(resolve, milliseconds);
    });
  }
}

const pause = (milliseconds) => new Promise((resolve) => setTimeout(resolve, milliseconds));
const later = (failures) => Math.min(LONGEST_MS, 500 * 2 ** failures);

async function follow(known, daemon, news, signal) {
  let [failures, past, asked] = [0, null, 0];
  while (!signal.aborted) {
    try {
      const info = await daemon.ask("v1");
      if (past === null || known.boot !== info.boot_id || performance.now() - asked > HISTORY_MS) {
        past = await daemon.ask("v1/history");
        asked = performance.now();
      }
      const paths = ["v1/stats", "v1/namespaces", "v1/policies", "v1/prefixes"];
      if (info.scopes.includes("admin")) paths.push("v1/tenants");
      const [stats, { namespaces }, { policies }, { prefixes }, rest] = await Promise.all(paths.map((path) => daemon.ask(path)));
      if (signal.aborted) return;
      at("figures").hidden = false;
      view.who(info, stats);
      view.degraded(stats.degraded);
      view.tiers(stats);
      view.hour(view.withNow(past, stats));
      view.namespaces(namespaces, stats, policies);
      view.prefixes(prefixes);
      view.policies(policies);
      view.tenants(rest?.tenants ?? null);
      known.figures = new Date();
      view.updated(known.figures);
      if (known.boot !== null && known.boot !== info.boot_id) say("The daemon was started anew.");
      else if (known.away || known.boot === null) say("Connected.");
      [failures, known.away, known.boot] = [0, false, info.boot_id];
    } catch (error) {
      if (signal.aborted) return;
      if (error instanceof Refused) {
        lock(error.message, true);
        return;
      }
      if (!(error instanceof Away || error instanceof Busy)) throw error;
      [failures, known.away] = [failures + 1, true];
      say(`${error.message} ${known.figures ? `The figures are of ${clock(known.figures)}.` : ""} Trying again…`, true);
    }
    await (failures ? pause(later(failures)) : Promise.all([pause(SOONEST_MS), news.wait(EVERY_MS)]));
  }
}

async function listen(known, daemon, news, signal) {
  let failures = 0;
  view.notices(known.latest);
  view.listening("");
  while (!signal.aborted) {
    try {
      for await (const notice of daemon.notices(known.notice)) {
        failures = 0;
        if (notice !== null) {
          known.notice = notice.id;
          known.latest = [{ ...notice, came: new Date() }, ...known.latest].slice(0, LATEST);
        }
        view.listening("Live.");
        view.notices(known.latest);
        news.ring();
      }
    } catch (error) {
      if (signal.aborted || error instanceof Refused) return; // whoever asks for figures says so
      if (!(error instanceof Away || error instanceof Busy)) throw error;
      view.listening(error instanceof Busy ? `Not live: the daemon is busy with ${error.message}.` : "Not live: trying again…");
    }
    failures += 1;
    await pause(later(failures));
  }
}

at("unlock").addEventListener("submit", (event) => {
  event.preventDefault();
  open(at("token").value.trim());
});

function begin() {
  const token = tokenFromAddress();
  if (token !== null) open(token);
  return token !== null;
}

addEventListener("hashchange", begin);
addEventListener("pagehide", stop);
addEventListener("pageshow", start);
document.addEventListener("visibilitychange", () => (document.hidden ? stop() : start()));
if (!begin()) lock("The page shows what a token may see. Make one with “kvtcd token”, or open the page as “http://…/#TOKEN”.");
