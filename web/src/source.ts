// The source of answers: the server, or, in a report, the page itself.

import type { About, Level, LiveStatus, Moment, Opened, Start, SweepAnswer, SweepState } from "./answers";

export type Parameters = Record<string, string | number | undefined>;

export interface Source {
  /** True for a report, which contains only some answers. */
  readonly embedded: boolean;
  ask<T>(question: string, given?: Parameters, signal?: AbortSignal): Promise<T>;
  /** Send a file, to be opened like those of the table. */
  send(file: File): Promise<Opened>;
  /** Run a sweep and report its progress. */
  sweep(file: number, policies: string[], tell: (state: SweepState) => void): Promise<void>;
  live(tell: (status: LiveStatus) => void, signal: AbortSignal): Promise<void>;
}

export function openSource(): Source {
  const data = document.getElementById("vram-data");
  return data ? new Embedded(JSON.parse(data.textContent ?? "{}") as Written) : new Server(readToken());
}

function readToken(): string {
  return new URLSearchParams(location.hash.slice(1)).get("token") ?? "";
}

class Server implements Source {
  readonly embedded = false;
  constructor(private readonly token: string) {}

  async ask<T>(question: string, given: Parameters = {}, signal?: AbortSignal): Promise<T> {
    const query = new URLSearchParams();
    for (const [name, value] of Object.entries(given)) if (value !== undefined) query.set(name, String(value));
    const response = await this.fetch(`api/${question}?${query}`, { signal: signal ?? null });
    return (await response.json()) as T;
  }

  async send(file: File): Promise<Opened> {
    const headers = { "X-Vram-Name": encodeURIComponent(file.name) };
    const response = await this.fetch("api/open", { method: "POST", body: file, headers });
    return (await response.json()) as Opened;
  }

  async sweep(file: number, policies: string[], tell: (state: SweepState) => void): Promise<void> {
    const response = await this.fetch("api/sweep", { method: "POST", body: JSON.stringify({ file, policies }) });
    const { sweep } = (await response.json()) as { sweep: string };
    const state = await this.fetch(`api/sweep/state?${new URLSearchParams({ sweep })}`, {});
    for await (const each of events<SweepState>(state)) tell(each);
  }

  async live(tell: (status: LiveStatus) => void, signal: AbortSignal): Promise<void> {
    const response = await this.fetch("api/live", { signal });
    for await (const each of events<{ status?: LiveStatus; error?: string }>(response)) {
      if (each.error !== undefined) throw new Error(each.error);
      if (each.status) tell(each.status);
    }
  }

  private async fetch(path: string, options: RequestInit): Promise<Response> {
    const response = await fetch(path, { ...options, headers: { ...options.headers, "X-Vram-Token": this.token } });
    if (response.ok) return response;
    const answer = (await response.json().catch(() => ({}))) as { error?: string };
    throw new Error(answer.error ?? `the server answered ${response.status}`);
  }
}

/** Read server-sent events with fetch: EventSource cannot send the token in a header. */
async function* events<T>(response: Response): AsyncGenerator<T> {
  const reader = response.body!.pipeThrough(new TextDecoderStream()).getReader();
  let rest = "";
  for (;;) {
    const { done, value } = await reader.read();
    if (done) return;
    const parts = (rest + value).split("\n\n");
    rest = parts.pop() ?? "";
    for (const part of parts) if (part.startsWith("data: ")) yield JSON.parse(part.slice(6)) as T;
  }
}

/** The data of `vram.web.report`: answers by question and parameters. */
interface Written {
  start: Start;
  about: About;
  levels: Record<string, Level>;
  bands: Record<string, unknown>;
  stacks: Record<string, unknown>;
  moments: Record<string, unknown>;
  holders: Record<string, unknown>;
  why: Record<string, unknown>;
  sweep: SweepAnswer | null;
}

class Embedded implements Source {
  readonly embedded = true;
  constructor(private readonly written: Written) {}

  async ask<T>(question: string, given: Parameters = {}): Promise<T> {
    return this.find(question, given) as T;
  }

  private find(question: string, given: Parameters): unknown {
    const { written } = this;
    switch (question) {
      case "start": return written.start;
      case "about": return written.about;
      case "level": return written.levels[`${given["axis"]}/${given["by"] ?? ""}`];
      case "bands": return written.bands[String(given["axis"])];
      case "stacks": return { stacks: written.stacks };
      case "event": return { event: this.nearest(Number(given["x"]), given["axis"]) };
      case "moment": return written.moments[this.nearest(Number(given["event"]))];
      case "why": return written.why[this.nearest(Number(given["event"]))];
      case "holders": return written.holders[`${this.nearest(Number(given["event"]))}/${given["by"]}`];
      default: throw new Error(`this report does not contain ${question}`);
    }
  }

  /** A report contains only some moments: the nearest to an event, or to a time. */
  private nearest(place: number, axis: unknown = "event"): number {
    const known = Object.entries(this.written.moments as Record<string, Moment>).map(([event, moment]) => ({
      event: Number(event),
      at: axis === "time" ? (moment.what?.time_us ?? 0) : Number(event),
    }));
    known.sort((one, other) => Math.abs(one.at - place) - Math.abs(other.at - place));
    return known[0]?.event ?? -1;
  }

  async sweep(_file: number, _policies: string[], tell: (state: SweepState) => void): Promise<void> {
    const answer = this.written.sweep;
    tell(answer ? { done: 1, count: 1, answer } : { done: 0, count: 0, error: "this report contains no sweep" });
  }

  async send(): Promise<Opened> {
    throw new Error("a report cannot open files; use vram serve");
  }

  async live(): Promise<void> {
    throw new Error("a report cannot show a running process");
  }
}
