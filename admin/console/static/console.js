// The console's script, in addition to htmx: theme, menu, dialogs, copying, charts, uploads and playground streams.
"use strict";

(() => {
  const meta = (name) => document.querySelector(`meta[name="${name}"]`)?.content ?? "";
  const root = meta("console-root");
  const csrf = () => meta("csrf-token");

  // Theme: stored in a cookie, so that the server sends the page in the right theme.
  function toggleTheme() {
    const shown = document.documentElement.dataset.theme;
    const dark = shown === "dark" || (shown !== "light" && matchMedia("(prefers-color-scheme: dark)").matches);
    const wanted = dark ? "light" : "dark";
    document.documentElement.dataset.theme = wanted;
    document.cookie = `loramux_theme=${wanted}; path=/; max-age=31536000; samesite=lax`;
    document.querySelectorAll("[data-chart]").forEach(drawChart);
  }

  // Charts: uPlot, with data from the element's attribute.
  const colour = (name) => getComputedStyle(document.documentElement).getPropertyValue(name).trim();
  const shades = ["--accent", "--kv", "--c4", "--c5", "--prefix", "--adapters"];

  function compact(value) {
    if (value === null || value === undefined) return "–";
    return new Intl.NumberFormat("en", { notation: "compact", maximumSignificantDigits: 3 }).format(value);
  }

  // Times for ranges of up to two days, otherwise dates. Times are in UTC and in 24-hour format, as in the tables.
  function timesOf(x) {
    const day = { month: "short", day: "numeric" };
    const clock = { hour: "2-digit", minute: "2-digit", hourCycle: "h23" };
    const format = (parts) => new Intl.DateTimeFormat("en", { timeZone: "UTC", ...parts });
    const axis = format(x.at(-1) - x[0] > 2 * 86400 ? day : clock);
    const whole = format({ ...day, ...clock });
    const shown = (format) => (seconds) => (seconds === null || seconds === undefined ? "–" : format.format(new Date(seconds * 1000)));
    return { axis: shown(axis), whole: shown(whole) };
  }

  function drawChart(element) {
    const series = JSON.parse(element.dataset.chart);
    const times = timesOf(series.x);
    element.plot?.destroy();
    const axis = { stroke: colour("--ink-3"), grid: { stroke: colour("--line"), width: 1 }, ticks: { show: false } };
    element.plot = new uPlot({
      width: element.clientWidth || 300,
      height: Number(element.dataset.height ?? 180),
      cursor: { points: { size: 6 } },
      tzDate: (seconds) => uPlot.tzDate(new Date(seconds * 1000), "Etc/UTC"),
      scales: { y: { range: (_, low, high) => [0, high > 0 ? high * 1.1 : 1] } },
      axes: [{ ...axis, values: (_, ticks) => ticks.map(times.axis) }, { ...axis, size: 46, values: (_, ticks) => ticks.map(compact) }],
      series: [{ label: "Time", value: (_, value) => times.whole(value) }, ...series.names.map((label, i) => ({
        label,
        stroke: colour(shades[i % shades.length]),
        fill: series.names.length === 1 ? colour("--accent-soft") : undefined,
        width: 1.5,
        points: { show: series.x.length < 3 },
        value: (_, value) => compact(value),
      }))],
    }, [series.x, ...series.y], element);
  }

  let resizing = 0;
  addEventListener("resize", () => {
    clearTimeout(resizing);
    resizing = setTimeout(() => document.querySelectorAll("[data-chart]").forEach(drawChart), 150);
  });

  // Uploads: the files are hashed here, declared, sent, and turned into a version.
  const hex = (buffer) => [...new Uint8Array(buffer)].map((byte) => byte.toString(16).padStart(2, "0")).join("");

  // The message of a refusal. A proxy's is not JSON.
  function refusalOf(response, text) {
    try {
      return JSON.parse(text).error.message;
    } catch {
      return `the server answered ${response.status}`;
    }
  }

  async function call(method, path, body, headers) {
    const response = await fetch(root + path, { method, body, headers: { "x-csrf-token": csrf(), ...headers } });
    const text = await response.text();
    if (!response.ok) throw new Error(refusalOf(response, text));
    return text ? JSON.parse(text) : {};
  }

  async function upload(form) {
    const says = form.querySelector("[data-progress]");
    const button = form.querySelector("button");
    const say = (text, kind) => { says.textContent = text; says.className = kind ?? "hint"; };
    const files = [...form.querySelectorAll("input[type=file]")].flatMap((input) => [...input.files]);
    const wanted = ["adapter_config.json", "adapter_model.safetensors"];
    const optional = ["chat_template.jinja", "generation_config.json", "parsers.json", "added_vocabulary.json", "pooling.json"];
    // What training writes beside an adapter. Pushes from the command line do not read these files, either.
    const ignored = [
      "README.md", "added_tokens.json", "merges.txt", "optimizer.pt", "rng_state.pth", "scaler.pt", "scheduler.pt",
      "special_tokens_map.json", "trainer_state.json", "training_args.bin", "vocab.json",
    ];
    const chosen = [...wanted, ...optional].map((name) => files.find((file) => file.name === name)).filter((file) => file);
    if (!wanted.every((name) => chosen.some((file) => file.name === name))) {
      say(`Choose ${wanted.join(" and ")}, as PEFT saved them. You can add ${optional.join(", ")}.`, "notice error");
      return;
    }
    if (files.some((file) => ["tokenizer.json", "tokenizer_config.json"].includes(file.name))) {
      say("This page does not read tokenizers. Push the directory with loramux adapters push, or choose the files without the tokenizer to use the base's.", "notice error");
      return;
    }
    const unknown = files.map((file) => file.name).filter((name) => ![...wanted, ...optional, ...ignored].includes(name));
    if (unknown.length) {
      say(`Versions do not contain ${unknown.join(", ")}. Choose the files without them, or push the directory with loramux adapters push.`, "notice error");
      return;
    }
    if (!crypto.subtle) {
      say("Browsers compute checksums only over HTTPS or on localhost. Use one of these, or run loramux adapters push.", "notice error");
      return;
    }
    button.disabled = true;
    const base = `/adapters/${form.dataset.adapter}`;
    let made;
    try {
      const declared = [];
      for (const file of chosen) {
        say(`Computing the checksum of ${file.name} …`);
        const sha256 = hex(await crypto.subtle.digest("SHA-256", await file.arrayBuffer()));
        declared.push({ name: file.name, size: file.size, sha256 });
      }
      made = await call("POST", `${base}/uploads`, JSON.stringify({ files: declared }), { "content-type": "application/json" });
      for (const file of chosen) {
        say(`Sending ${file.name} …`);
        await call("PUT", `${base}/uploads/${made.id}/files/${file.name}`, file, { "content-type": "application/octet-stream" });
      }
      const version = await call("POST", `${base}/versions`, JSON.stringify({ upload_id: made.id }), { "content-type": "application/json" });
      location.assign(`${root}${base}/versions/${version.number}`);
    } catch (error) {
      say(`Not uploaded: ${error.message}.`, "notice error");
      button.disabled = false;
      // Until the upload expires, its declared bytes count against the quota. A used upload cannot be cancelled.
      if (made) call("DELETE", `${base}/uploads/${made.id}`).catch(() => {});
    }
  }

  // Playground: one stream per lane, shown as it arrives.
  // Thinking, text and tool calls are separate parts. Consecutive texts of one kind are joined.
  function append(output, kind, text) {
    let part = output.lastElementChild;
    if (part?.dataset.kind !== kind) {
      part = document.createElement("span");
      part.dataset.kind = kind;
      output.append(part);
    }
    part.textContent += text;
  }

  // `lane.turns` are the complete turns of the lane's conversation, which the next question continues.
  async function stream(lane, form, isNext) {
    const output = lane.querySelector("output");
    const figures = lane.querySelector("[data-figures]");
    const model = lane.querySelector("[name=model]").value.trim();
    const message = form.elements.message.value;
    if (isNext && !lane.turns?.length) return;
    figures.textContent = "";
    if (isNext) {
      append(output, "question", message);
    } else {
      output.textContent = "";
    }
    const history = isNext ? lane.turns : [];
    lane.turns = history;
    if (!model) return;
    lane.stopping = new AbortController();
    const started = performance.now();
    let first = null;
    let tokens = 0;
    try {
      const response = await fetch(`${root}/playground/stream`, {
        method: "POST",
        signal: lane.stopping.signal,
        headers: { "content-type": "application/json", "x-csrf-token": csrf() },
        body: JSON.stringify({
          tenant: form.elements.tenant?.value ?? "",
          model,
          message,
          history,
          system: form.elements.system.value,
          max_tokens: Number(form.elements.max_tokens.value) || 64,
          temperature: Number(form.elements.temperature.value) || 0,
          json_schema: form.elements.json_schema.value,
          tools: form.elements.tools.value,
        }),
      });
      if (!response.ok) throw new Error(refusalOf(response, await response.text()));
      const served = response.headers.get("x-loramux-adapter") ?? model;
      let rest = "";
      let answer = "";
      let hasCalls = false;
      for (const reader = response.body.pipeThrough(new TextDecoderStream()).getReader(); ;) {
        const { value, done } = await reader.read();
        if (done) break;
        const events = (rest + value).split("\n\n");
        rest = events.pop();
        for (const event of events) {
          const data = event.replace(/^data: /, "");
          if (data === "[DONE]") continue;
          const chunk = JSON.parse(data);
          if (chunk.error) throw new Error(chunk.error.message);
          const delta = chunk.choices?.[0]?.delta ?? {};
          const calls = delta.tool_calls ?? [];
          if (delta.reasoning || delta.content || calls.length) first ??= performance.now() - started;
          if (delta.reasoning) append(output, "thinking", delta.reasoning);
          if (delta.content) append(output, "text", delta.content);
          answer += delta.content ?? "";
          hasCalls ||= calls.length > 0;
          for (const { index, function: called } of calls) {
            append(output, `call ${index}`, called.name ? `${called.name} ${called.arguments ?? ""}` : called.arguments);
          }
          tokens = chunk.usage?.completion_tokens ?? tokens;
        }
      }
      const turns = [...history, { role: "user", content: message }, { role: "assistant", content: answer }];
      // After calls, a model expects their results before another question, and nothing runs the calls.
      lane.turns = answer && !hasCalls ? turns : [];
      const all = performance.now() - started;
      figures.textContent = `${served} · first token ${Math.round(first ?? all)} ms · ${tokens} tokens · ${Math.round(all)} ms`;
    } catch (error) {
      figures.textContent = error.name === "AbortError" ? "Stopped." : `Failed: ${error.message}`;
    }
  }

  async function play(form, isNext) {
    const lanes = [...document.querySelectorAll(".lane")];
    const [run, next, stop] = ["run", "continue", "stop"].map((name) => form.querySelector(`[data-${name}]`));
    run.disabled = next.disabled = true;
    stop.disabled = false;
    await Promise.all(lanes.map((lane) => stream(lane, form, isNext)));
    run.disabled = false;
    next.disabled = !lanes.some((lane) => lane.turns?.length);
    stop.disabled = true;
  }

  // One delegated listener per event, so that elements that htmx adds need no listeners of their own.
  document.addEventListener("click", async (event) => {
    const target = event.target.closest("button, a");
    if (!target) return;
    if (target.matches("[data-theme-toggle]")) toggleTheme();
    if (target.matches(".menu-button")) {
      const isOpen = document.getElementById("nav").classList.toggle("open");
      target.setAttribute("aria-expanded", String(isOpen));
    }
    if (target.matches("[data-opens]")) document.getElementById(target.dataset.opens)?.showModal();
    if (target.matches("[data-closes]")) target.closest("dialog")?.close();
    if (target.matches("[data-stop]")) document.querySelectorAll(".lane").forEach((lane) => lane.stopping?.abort());
    if (target.matches("[data-copy]")) {
      const source = target.closest(".copyable, .snippet")?.querySelector("[data-copy-source]");
      try {
        await navigator.clipboard.writeText(source.textContent);
        target.textContent = "Copied";
      } catch {
        getSelection().selectAllChildren(source);
        target.textContent = "Selected";
      }
    }
  });

  document.addEventListener("submit", (event) => {
    const form = event.target;
    if (form.matches("[data-upload]")) {
      event.preventDefault();
      upload(form);
    } else if (form.matches("[data-playground]")) {
      event.preventDefault();
      play(form, event.submitter?.matches("[data-continue]") ?? false);
    } else if (form.method === "post") {
      // A double click must not send the form twice. After Stop or Esc, the form stays, and can be sent again.
      if (form.isSent) event.preventDefault();
      form.isSent = true;
      setTimeout(() => { form.isSent = false; }, 2000);
    }
  });

  // A page from the browser's cache has forms that were sent, and old data.
  addEventListener("pageshow", (event) => { if (event.persisted) location.reload(); });

  document.addEventListener("change", (event) => {
    if (event.target.matches("[data-submits]")) event.target.form.requestSubmit();
  });

  // Live parts: show when they are offline, keep the focus, and sign in again when the session has ended.
  const offline = (isSo) => { const note = document.getElementById("offline"); if (note) note.hidden = !isSo; };
  document.addEventListener("htmx:sseError", () => offline(true));
  document.addEventListener("htmx:sseOpen", () => offline(false));
  document.addEventListener("htmx:sseClose", (event) => { if (event.detail.type === "message") location.reload(); });

  function whereabouts(element) {
    if (element?.id) return `#${CSS.escape(element.id)}`;
    const form = element?.closest?.("form[action]");
    if (form) return `form[action="${CSS.escape(form.getAttribute("action"))}"] ${element.localName}`;
    return element?.getAttribute?.("href") ? `a[href="${CSS.escape(element.getAttribute("href"))}"]` : null;
  }
  let focused = null;
  document.addEventListener("htmx:sseBeforeMessage", (event) => {
    const active = document.activeElement;
    focused = event.target.contains(active) ? whereabouts(active) : null;
  });
  document.addEventListener("htmx:sseMessage", (event) => {
    if (focused) event.target.querySelector(focused)?.focus({ preventScroll: true });
    focused = null;
  });

  document.addEventListener("htmx:load", (event) => {
    const loaded = event.detail.elt;
    (loaded.matches?.("[data-chart]") ? [loaded] : []).concat([...loaded.querySelectorAll?.("[data-chart]") ?? []]).forEach(drawChart);
  });
})();
