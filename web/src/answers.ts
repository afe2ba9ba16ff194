// Types of the server's answers; `vram.web.recordings` produces them.

export interface FileName { file: number; name: string; bytes: number }
export interface Start { files: FileName[]; folder?: string; live: boolean }
export interface Reading { done: number; bytes: number; open: boolean }
export interface Opened { file: number; files: FileName[] }

export interface Mark { name: string; from: number; to: number; depth: number }
export interface Failure { event: number; x: number; size: number }

/** What the allocator could reserve: exactly `bytes`, or from `bytes` to below `below`; null if unknown. */
export interface Limit { bytes: number | null; known: boolean; below: number | null }

/** One line about a recording. */
export interface Summary {
  source: string; events: number; span_us: number; timed: boolean; peak: number; start: number; limit: Limit;
  most: Record<string, number>; failed: number | null; verdict: string; fragmentation: number;
}

export interface Difference {
  by: string; before: number; after: number; gap: number; events: [number, number];
  groups: { group: string; before: number; after: number; gap: number; blocks_before: number; blocks_after: number }[];
}

export interface About {
  source: string; device: number; devices: number[]; events: number; dropped: number; truncated: boolean;
  timed: boolean; span_us: number; allocations: number; streams: string[]; tags: boolean; stacks: number;
  peak: number; start: number;
  most: Record<string, number>;
  limit: Limit;
  failures: Failure[];
  steps: [number: number, event: number, time: number][];
  marks: Mark[];
}

export interface Level { exact: boolean; x: number[]; series: { name: string; values: number[] }[] }

export interface Band {
  start: number; freed: number; size: number; held: number; stack: number; stream: string;
  end: number; path: number[];
}

export interface Stack { label: string; frames: string[] }

// offset, size, held, requested, pending, blocks, stack, event
export type Piece = [number, number, number, number, number, number, number, number];

export interface Segment {
  address: string; size: number; stream: string; kind: string; expandable: boolean; pieces: Piece[];
}

export interface EventAnswer {
  action: string; address: string; size: number; stream: string; time_us: number; stack: number;
  tag: string; step: number | null; device_free?: number | null;
}

export interface ListedEvent extends EventAnswer { event: number; label: string }

export interface Moment {
  event: number; what: EventAnswer | null;
  allocated: number; requested: number; reserved: number;
  verdict: string; parts: Record<string, number>; meanings: Record<string, string>;
  largest_free: number; fragmentation: number;
  segments: Segment[];
}

export interface Holder {
  name: string; bytes: number; before: number; blocks: number; stacks: number[]; children: Holder[];
}

export interface Group { group: string; key: string | number | null; bytes: number; blocks: number; frames?: string[] }
export interface Remedy { what: string; setting: string; fits: boolean | null; needs: number | null; evidence: string }

export interface Why {
  at: { kind: string; event: number; step: number | null };
  verdict: string; headline: string; reason: string; text: string; note: string; doubts: string[];
  request: { size: number; needed: number; stream: number; frames: string[] } | null;
  allocated: number; reserved: number; largest_free: number;
  bytes: Record<string, number>; shares: Record<string, number | null>; device: number; meanings: Record<string, string>;
  holders: Record<string, Group[]>;
  remedies: Remedy[];
}

export interface Ranked {
  rank: number; policy: string; conf: Record<string, string>; environment: string;
  peak_reserved: number; smallest_capacity: number | null; driver_us: number; retries: number;
}

export interface SweepAnswer { peak_allocated: number; policies: string[]; ranked: Ranked[] }
export interface SweepState { done: number; count: number; answer?: SweepAnswer; error?: string }

// The status of a running process from `vram.observe.monitor`.
export interface LivePool {
  pool: number; kind: string; device: string; limit: number | null;
  allocated: number; requested: number; reserved: number; pending: number; cached: number; free: number;
  spilled?: number; spill?: Partial<Record<string, number>>;
  largest_free: number; peak_allocated: number; peak_reserved: number;
  live: number; allocations: number; rate: number; hit_rate: number; fragmentation: number; out_of_memory: number;
}
export interface LiveDevice {
  name: string; kind: string; total: number; pools: number; libraries: number; processes: number;
  unknown: number; free: number; utilization?: number | null;
}
export interface LiveStatus {
  pid: number; program: string; time: number;
  pools: LivePool[]; devices: LiveDevice[];
  streams: { pool: number; device: string; stream: number; live: number; cached: number; pending_blocks: number }[];
  tags: { tag: string | null; bytes: number; count: number }[];
  holders: { pool: number; tag: string | null; stack: [string, number, string][]; count: number; bytes: number; spilled?: number }[];
  spilled?: {
    pool: number; tag: string | null; bytes: number; moved_out_bytes: number; moved_back_bytes: number; seconds: number;
    saved_bytes: number; saved_out_bytes: number; saved_back_bytes: number;
  }[];
  processes?: { device: string; pid: number; name: string; bytes: number | null }[];
  history: number[][];
}
