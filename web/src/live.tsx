// Live: a running process, updated about once a second from its monitor.

import { useEffect, useRef, useState } from "preact/hooks";
import uPlot from "uplot";
import type { LiveDevice, LivePool, LiveStatus } from "./answers";
import { binarySteps } from "./chart";
import { css } from "./colors";
import { count, share, size } from "./format";
import { Meter, Slice, useSize, useTheme } from "./parts";
import { message, source } from "./state";

const DEVICE_PARTS = [
  ["pools", "live", "pools of this process"], ["libraries", "rounding", "other libraries in this process"],
  ["processes", "foreign", "other processes"], ["unknown", "withheld", "unknown"], ["free", "unused", "free"],
] as const;

export function Live() {
  const [status, setStatus] = useState<LiveStatus | null>(null);
  const [error, setError] = useState("");
  const [paused, setPaused] = useState(false);
  useEffect(() => {
    if (paused) return;
    const watching = new AbortController();
    setError("");
    source.live(setStatus, watching.signal).catch((wrong: unknown) => watching.signal.aborted || setError(message(wrong)));
    return () => watching.abort();
  }, [paused]);
  return (
    <section class="view live" aria-label="Live">
      <div class="tools">
        <b>{status ? `${status.program || "process"} (${status.pid})` : "waiting …"}</b>
        <span class="spread" />
        <button type="button" aria-pressed={paused} onClick={() => setPaused(!paused)}>{paused ? "Resume" : "Pause"}</button>
      </div>
      {error && <p class="error" role="alert">{error}</p>}
      {status && (
        <div class="columns">
          <History rows={status.history} />
          {status.devices.map((each) => <Device key={each.name} device={each} />)}
          <h2>Pools</h2>
          <table class="wide pools">
            <thead><tr><th>pool</th><th>device</th><th class="number">allocated</th><th class="number">reserved</th><th class="number">pending</th>
              <th class="number">cached</th><th class="number">spilled</th><th class="number">peak</th><th class="number">live</th><th class="number">per second</th>
              <th class="number">hit rate</th><th class="number">fragmented</th><th class="number">OOM</th></tr></thead>
            <tbody>
              {status.pools.map((pool) => (
                <tr key={pool.pool}>
                  <td>{pool.kind} {pool.pool}</td><td>{pool.device}</td>
                  <td class="number">{size(pool.allocated)}</td><td class="number">{size(pool.reserved)}</td>
                  <td class="number">{size(pool.pending)}</td><td class="number">{size(pool.cached)}</td>
                  <td class="number">{size(pool.spilled ?? 0)}</td>
                  <td class="number">{size(pool.peak_allocated)}</td><td class="number">{count(pool.live)}</td>
                  <td class="number">{count(Math.round(pool.rate))}</td><td class="number">{share(pool.hit_rate, 1)}</td>
                  <td class="number">{share(pool.fragmentation, 1)}</td><td class="number">{count(pool.out_of_memory)}</td>
                </tr>
              ))}
            </tbody>
          </table>
          {status.pools.filter((pool) => pool.spill?.moved_out_bytes || pool.spill?.saved_out_bytes).map((pool) => (
            <p key={pool.pool} class="moved">{pool.kind} {pool.pool}: {moved(pool)}</p>
          ))}
          <Spilled status={status} />
          <Holders status={status} />
          <Processes status={status} />
        </div>
      )}
    </section>
  );
}

/** What spilling has moved so far. A process with an older vram does not tell. */
function moved(pool: LivePool): string {
  const spill = pool.spill;
  const told: string[] = [];
  if (spill?.count) told.push(`${size(spill.moved_out_bytes ?? 0)} moved to host memory, ${size(spill.moved_back_bytes ?? 0)} back, streams held for ${(spill.seconds ?? 0).toFixed(3)} s`);
  if (spill?.saved_out_bytes) told.push(`saved tensors: ${size(spill.saved_bytes ?? 0)} in host memory now, ${size(spill.saved_out_bytes)} copied there, ${size(spill.saved_back_bytes ?? 0)} back`);
  return told.join("; ");
}

/** What spilling has moved of each tag. */
function Spilled(props: { status: LiveStatus }) {
  const { spilled } = props.status;
  if (!spilled?.length) return null;
  return (
    <>
      <h2>Spilled to host memory, by tag</h2>
      <table class="wide spilled">
        <thead><tr><th>tag</th><th class="number">pool</th><th class="number">there now</th><th class="number">moved there</th><th class="number">moved back</th>
          <th class="number">streams held</th><th class="number">saved tensors there now</th><th class="number">copied there</th><th class="number">copied back</th></tr></thead>
        <tbody>
          {spilled.slice(0, 20).map((each) => (
            <tr key={`${each.pool} ${each.tag}`}><td>{each.tag ?? "(no tag)"}</td><td class="number">{String(each.pool)}</td>
              <td class="number">{size(each.bytes)}</td><td class="number">{size(each.moved_out_bytes)}</td><td class="number">{size(each.moved_back_bytes)}</td>
              <td class="number">{`${each.seconds.toFixed(3)} s`}</td>
              <td class="number">{size(each.saved_bytes)}</td><td class="number">{size(each.saved_out_bytes)}</td><td class="number">{size(each.saved_back_bytes)}</td></tr>
          ))}
        </tbody>
      </table>
    </>
  );
}

function Device(props: { device: LiveDevice }) {
  const { device } = props;
  const parts = DEVICE_PARTS.filter(([name]) => device[name] > 0);
  return (
    <div class="device">
      <h2>{device.name} <span class="dim">{size(device.total)}{device.utilization != null && `, ${device.utilization} % busy`}</span></h2>
      <div class="bar">{parts.map(([name, color, words]) => (
        <Slice key={name} share={device[name] / Math.max(1, device.total)} color={color} title={`${words}: ${size(device[name])}`} />
      ))}</div>
      <p class="keys">{parts.map(([name, color, words]) => (
        <span key={name}><i class={`dot ${color}`} />{words} {size(device[name])}</span>
      ))}</p>
    </div>
  );
}

/** Other processes on the devices, as far as the driver tells. */
function Processes(props: { status: LiveStatus }) {
  const { processes } = props.status;
  if (!processes?.length) return null;
  return (
    <>
      <h2>Other processes</h2>
      <table class="wide processes">
        <thead><tr><th class="number">pid</th><th>process</th><th>device</th><th class="number">size</th></tr></thead>
        <tbody>
          {processes.map((each) => (
            <tr key={`${each.device} ${each.pid}`}><td class="number">{String(each.pid)}</td><td>{each.name || "(not visible here)"}</td><td>{each.device}</td>
              <td class="number">{each.bytes === null ? "not told" : size(each.bytes)}</td></tr>
          ))}
        </tbody>
      </table>
    </>
  );
}

function Holders(props: { status: LiveStatus }) {
  const { tags, holders, streams } = props.status;
  const most = Math.max(1, ...holders.map((each) => each.bytes), ...tags.map((each) => each.bytes));
  return (
    <>
      <h2>Held by</h2>
      <table class="wide">
        <thead><tr><th>line</th><th>tag</th><th class="number">size</th><th class="number">spilled</th><th class="number">blocks</th></tr></thead>
        <tbody>
          {holders.slice(0, 20).map((each, index) => (
            <tr key={index} title={each.stack.map(([file, line, name]) => `${file}:${line} ${name}`).join("\n")}>
              <td><Meter share={each.bytes / most}>{each.stack[0] ? `${each.stack[0][0]}:${each.stack[0][1]} ${each.stack[0][2]}` : "(no stack; enable the stacks setting)"}</Meter></td>
              <td>{each.tag ?? ""}</td><td class="number">{size(each.bytes)}</td><td class="number">{size(each.spilled ?? 0)}</td><td class="number">{count(each.count)}</td>
            </tr>
          ))}
        </tbody>
      </table>
      <h2>Streams</h2>
      <table class="wide">
        <thead><tr><th>stream</th><th>device</th><th class="number">live</th><th class="number">cached</th><th class="number">pending blocks</th></tr></thead>
        <tbody>
          {streams.map((each, index) => (
            <tr key={index}><td>{String(each.stream)}</td><td>{each.device}</td><td class="number">{size(each.live)}</td>
              <td class="number">{size(each.cached)}</td><td class="number">{count(each.pending_blocks)}</td></tr>
          ))}
        </tbody>
      </table>
    </>
  );
}

const LINES = [["allocated", 1], ["reserved", 2], ["pending", 3]] as const;

/** The last minutes. Rows are time, allocated, reserved, pending and allocations per second. */
function History(props: { rows: number[][] }) {
  const [box, width] = useSize<HTMLDivElement>();
  const theme = useTheme();
  const host = useRef<HTMLDivElement>(null);
  const plot = useRef<uPlot | null>(null);
  const data = (): uPlot.AlignedData =>
    [props.rows.map((row) => row[0]!), ...LINES.map(([, place]) => props.rows.map((row) => row[place]!))] as uPlot.AlignedData;
  useEffect(() => {
    if (!host.current || width < 60) return;
    const axis = { stroke: () => css("dim"), grid: { stroke: () => css("grid"), width: 1 }, ticks: { show: false }, font: css("axis-font") };
    plot.current = new uPlot({
      width, height: 180, legend: { show: false }, cursor: { y: false },
      scales: { x: { time: true }, y: { range: (_plot, _low, high) => [0, Math.max(1, high * 1.06)] } },
      series: [{}, ...LINES.map(([name]) => ({ label: name, stroke: () => css(`${name}-line`), width: 1.5, points: { show: false }, paths: uPlot.paths.stepped!({ align: 1 }) }))],
      axes: [{ ...axis, size: 28 }, { ...axis, size: 66, splits: (_plot, _index, _low, high) => binarySteps(high), values: (_plot, splits) => splits.map(size) }],
    }, data(), host.current);
    return () => {
      plot.current?.destroy();
      plot.current = null;
    };
  }, [width, theme]);
  useEffect(() => plot.current?.setData(data()), [props.rows]);
  return <div class="history" ref={box}><div ref={host} />
    <p class="keys">{LINES.map(([name]) => <span key={name}><i class={`stroke ${name}`} />{name}</span>)}</p></div>;
}
