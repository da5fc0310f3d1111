// What is shown of what the daemon says, section by section.

import { bar, lines } from "./chart.js";
import { bytes, bytesText, clock, count, duration, element, NONE, percentText, ratio, share, short, show, table } from "./dom.js";

const HOUR_S = 3600;
const ROW_S = 300;

const at = (id) => document.getElementById(id);
const sum = (rows, of) => rows.reduce((total, row) => total + of(row), 0);
const number = (name) => ({ name, kind: "number" });
const long = (name) => ({ name, kind: "long" });
const column = (name) => ({ name, kind: null });
const empty = (text) => element("p", { class: "note" }, text);

/** Return the counts of every form in every tier. */
function places(tiers) {
  return Object.values(tiers).flatMap((tier) => [tier.raw, tier.packed].filter(Boolean));
}

function packed(tiers) {
  return Object.values(tiers).map((tier) => tier.packed).filter(Boolean);
}

/** Return the reads that found a block here or, `fetched`, in the store that daemons share. */
const hits = ({ tiers, fetched }) => fetched + sum(places(tiers), (place) => place.hits);

export function who(info, stats) {
  show(at("who"), `${info.version}, up for ${duration(stats.uptime_s)}, seen as ${info.tenant}`);
}

const FAULTS = {
  "left-out": "tenants are refused, since their disk environment could not be opened at the start",
  "set-aside": "damaged disk environments are set aside, until they are purged or moved away",
  "other-key": "tenants on disk are under another master key, and nothing of theirs is served",
  "out-of-use": "disk environments failed, and are out of use until the next start",
  "remote-away": "the store that is shared with other daemons does not answer",
  "remote-refuses": "the store that is shared with other daemons takes no blocks, and they wait",
  "unknown-gpu": "policies name GPUs for which the start has prepared nothing, and have to do without",
};

/** Show what is wrong while all else is served; the element is hidden while nothing is. */
export function degraded(faults) {
  const lines = Object.entries(faults ?? {}).map(([fault, times]) => `${FAULTS[fault] ?? fault} (${times})`);
  at("degraded").hidden = lines.length === 0;
  const text = lines.length === 0 ? "" : `Degraded: ${lines.join("; ")}.`;
  if (at("degraded").textContent !== text) at("degraded").textContent = text;
}

export function updated(date) {
  show(at("updated"), `Figures of ${clock(date)}.`);
}

/** Return a row for each GPU of a tier that has several. */
function devices(tier) {
  const found = Object.entries(tier.devices ?? {});
  return found.length < 2 ? [] : found.map(([name, device]) => [
    `of that ${name}`,
    [bytes(device.used), " of ", bytes(device.capacity), " (", share(device.used, device.capacity), ")"],
    NONE, [count(device.blocks), " blocks"], NONE, NONE, NONE,
  ]);
}

export function tiers(stats) {
  const rows = Object.entries(stats.tiers).flatMap(([name, tier]) => {
    const [raw, below] = [tier.raw?.bytes ?? 0, tier.packed?.bytes ?? 0];
    const filled = [
      { kind: "raw", value: raw }, { kind: "packed", value: below },
      { kind: "other", value: tier.used - raw - below }, { kind: "withheld", value: tier.withheld },
    ];
    const form = (counts) => (counts ? [count(counts.blocks), " blocks, ", bytes(counts.bytes)] : NONE);
    const whole = [
      name,
      [bytes(tier.used), " of ", bytes(tier.capacity), " (", share(tier.used, tier.capacity), ")", bar(filled, tier.capacity)],
      bytes(tier.withheld), form(tier.raw), form(tier.packed),
      ratio(tier.packed?.raw_bytes ?? 0, tier.packed?.bytes ?? 0),
      count(sum(places([tier]), (place) => place.hits)),
    ];
    return [whole, ...devices(tier)];
  });
  show(at("tiers"), table(
    "Tiers, fastest first, all tenants together; hits since the start",
    [column("Tier"), column("Used"), number("Withheld"), number("Raw"), number("Packed"), number("Ratio"), number("Hits")],
    rows,
  ));
  const facts = [
    ["Blocks", stats.blocks], ["Misses", stats.misses], ["Moves in flight", stats.moving],
    ["of these down", stats.demoting], ["Requests waiting", stats.waiting],
  ];
  show(at("moves"), ...facts.map(([name, value]) => element("div", {}, element("dt", {}, name), element("dd", {}, count(value)))));
}

/** Return the samples of the history, and this moment's behind them. */
export function withNow(history, stats) {
  const now = Object.entries(stats.tiers).map(([name, tier]) => {
    const of = (field) => sum(places([tier]), (place) => place[field]);
    return [name, { blocks: of("blocks"), bytes: of("bytes"), hits: of("hits") }];
  });
  const past = history.samples.filter((sample) => sample.uptime_s < stats.uptime_s);
  return [...past, { uptime_s: stats.uptime_s, misses: stats.misses, fetched: stats.fetched, tiers: Object.fromEntries(now) }];
}

/** Return for each sample how many blocks were read since the one before, and how many of them were here. */
function reads(samples, first) {
  return samples.map((sample, place) => {
    const since = place ? samples[place - 1] : first;
    const until = (moment) => moment.fetched + sum(Object.values(moment.tiers), (tier) => tier.hits);
    const found = until(sample) - until(since);
    return { at: sample.uptime_s, found, asked: found + sample.misses - since.misses };
  });
}

export function hour(samples) {
  const last = samples.at(-1);
  const names = Object.keys(last.tiers);
  const span = Math.min(HOUR_S, Math.max(60, last.uptime_s - samples[0].uptime_s));
  const read = reads(samples, samples[0]);
  const whole = read.reduce((total, { found, asked }) => ({ found: total.found + found, asked: total.asked + asked }));
  const common = (holder) => ({ now: last.uptime_s, span, width: Math.max(240, Math.min(holder.clientWidth, 640)) });
  show(at("bytes"), ...lines({
    name: "Bytes in each tier over time",
    summary: names.map((name) => `${name}: now ${bytesText(last.tiers[name].bytes)}`).join(", "),
    series: names.map((name) => ({ name, kind: name, points: samples.map((s) => [s.uptime_s, s.tiers[name]?.bytes ?? null]) })),
    top: Math.max(1, ...samples.flatMap((sample) => names.map((name) => sample.tiers[name]?.bytes ?? 0))),
    text: (value) => bytesText(Math.round(value)), ...common(at("bytes")),
  }));
  show(at("hits"), ...lines({
    name: "Share of blocks read that were here over time",
    summary: whole.asked ? `In all ${percentText(whole.found / whole.asked)} of ${whole.asked}` : "Nothing was read",
    series: [{ name: "hits", kind: "host", points: read.map(({ at: when, found, asked }) => [when, asked ? found / asked : null]) }],
    top: 1, text: percentText, ...common(at("hits")),
  }));
  const every = samples.filter((sample, place) => place === samples.length - 1
    || Math.floor(sample.uptime_s / ROW_S) !== Math.floor(samples[place + 1].uptime_s / ROW_S));
  const rows = reads(every, samples[0]).map(({ at: when, found, asked }, place) => [
    when === last.uptime_s ? "now" : `${duration(last.uptime_s - when)} ago`,
    ...names.map((name) => bytes(every[place].tiers[name]?.bytes ?? 0)),
    count(asked), share(found, asked),
  ]).reverse();
  show(at("hour"), table(
    "Every five minutes: bytes in each tier, and blocks read since the row below it",
    [column("When"), ...names.map((name) => number(name)), number("Read"), number("Hits")], rows,
  ));
}

export function namespaces(found, stats, policies) {
  const governing = Object.fromEntries(policies.flatMap((policy) => policy.namespaces.map((name) => [name, policy.name])));
  const rows = found.map(({ name, identity, codec, codec_reason: reason, expected_kl: kl, drift }) => {
    const unlike = drift?.state === "drifting" ? `unlike calibration: ${drift.why}` : null;
    const own = stats.own[name] ?? { misses: 0, fetched: 0, tiers: {} };
    const [below, all] = [packed(own.tiers), hits(own)];
    return [
      [name, element("span", { class: "note" }, identity.model)],
      [codec, ...[reason, unlike].filter(Boolean).map((note) => element("span", { class: "note" }, note))],
      ratio(sum(below, (place) => place.raw_bytes), sum(below, (place) => place.bytes)),
      kl === null ? NONE : element("data", { value: String(kl) }, kl.toPrecision(2)),
      bytes(sum(places(own.tiers), (place) => place.bytes)),
      count(all), count(own.misses), share(all, all + own.misses), governing[name] ?? NONE,
    ];
  });
  show(at("namespaces"), rows.length === 0
    ? empty("None yet. An engine registers one when it stores its first block.")
    : table(
      "Your namespaces: raw bytes over packed ones, and the divergence that calibration measured, in nats per token",
      [long("Namespace"), long("Codec"), number("Ratio"), number("KL"), number("Bytes"), number("Hits"), number("Misses"),
        number("Hit ratio"), column("Policy")],
      rows,
    ));
}

export function prefixes(found) {
  const rows = found.map(({ namespace, key, salt, matches, over, blocks }) => [
    short(key), namespace, salt ? short(salt) : NONE,
    over ? [count(matches), element("span", { class: "note" }, `at most ${over} too many`)] : count(matches), count(blocks),
  ]);
  show(at("prefixes"), rows.length === 0
    ? empty("No match has found anything yet.")
    : table("Your prefixes by their first block, since the start", [
      column("First block"), long("Namespace"), long("Salt"), number("Matches"), number("Longest, in blocks"),
    ], rows));
}

const MEANING = {
  stored: ({ tier, tokens }) => `${tokens} tokens, in ${tier}`,
  moved: ({ source, tier }) => `from ${source} to ${tier}`,
  dropped: ({ tier, reason, left }) => `${reason}, from ${tier}; ${left.length ? `still in ${left.join(" and ")}` : "nowhere left"}`,
  purged: () => "all its blocks are gone",
  overflow: () => "some notices were lost",
};

export function notices(latest) {
  const rows = latest.map(({ event, data, came }) => [
    clock(came), event, data.namespace ?? NONE, data.key === undefined ? NONE : short(data.key), MEANING[event]?.(data) ?? "",
  ]);
  show(at("notices"), rows.length === 0
    ? empty("Nothing has happened to your blocks since this page listens.")
    : table("What became of your blocks, the latest first", [
      column("Time"), column("What"), long("Namespace"), column("Block"), column("Where and why"),
    ], rows));
}

export function listening(text) {
  show(at("listening"), text);
}

/** Show tenants; null hides the section from whoever may not see them. */
export function tenants(found) {
  at("admin").hidden = found === null;
  if (found === null) return;
  const names = Object.keys(found[0]?.tiers ?? {});
  show(at("tenants"), found.length === 0 ? empty("None yet.") : table(
    "All tenants, and what their namespaces hold",
    [long("Tenant"), number("Namespaces"), ...names.map((name) => number(name)), number("Hits"), number("Misses")],
    found.map((each) => [
      each.tenant, count(each.namespaces.length),
      ...names.map((name) => {
        const held = places([each.tiers[name]]);
        return [count(sum(held, (place) => place.blocks)), " copies, ", bytes(sum(held, (place) => place.bytes))];
      }),
      count(hits(each)), count(each.misses),
    ]),
  ));
}

export function policies(found) {
  show(at("policies"), table(
    "In order: the first that fits a namespace governs it",
    [column("Policy"), long("Fits"), column("Codec"), column("Host"), column("Disk"), column("Goes first"), long("Governs")],
    found.map(({ name, match, codec, host, disk, evict, namespaces: governed }) => [
      name,
      Object.entries(match).filter(([, glob]) => glob !== "*").map(([field, glob]) => `${field} ${glob}`).join(", ") || "everything",
      ["ratio", "max_kl", "bits", "level"].filter((dial) => codec.name !== "lossless" && codec[dial] !== null)
        .reduce((text, dial) => `${text}, ${dial} ${codec[dial]}`, codec.name),
      host.form, `written ${disk.write === "behind" ? "behind each put" : "when evicted"}${disk.ttl ? `, for ${duration(disk.ttl)}` : ""}`,
      evict.policy, governed.join(", ") || NONE,
    ]),
  ));
}
