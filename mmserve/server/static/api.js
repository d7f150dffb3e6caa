// Requests to the server this page came from. The key lives in this module's memory and nowhere else.

let apiKey = "";
let askForKey = async () => null;

export class ApiError extends Error {
  constructor(message, code, status) {
    super(message);
    this.code = code;
    this.status = status;
  }
}

export function setKey(key) {
  apiKey = key.trim();
}

/** `ask` resolves to a key, or to null if the user has none. It is called when the server refuses a request. */
export function onKeyWanted(ask) {
  askForKey = ask;
}

/** A response that is ok. Throws `ApiError` with a sentence for the user. */
export async function request(path, options = {}) {
  for (;;) {
    const usedKey = apiKey;
    const response = await send(path, options);
    if (response.ok) return response;
    if (response.status === 401) {
      if (apiKey !== usedKey) continue;
      const key = await askForKey();
      if (key !== null) {
        setKey(key);
        continue;
      }
    }
    throw await errorOf(response);
  }
}

export async function getJson(path, options) {
  return (await request(path, options)).json();
}

export function postJson(path, body) {
  return getJson(path, {
    method: "POST",
    headers: { "Content-Type": "application/json" },
    body: JSON.stringify(body),
  });
}

export function postFile(file) {
  const form = new FormData();
  form.append("file", file, file.name);
  return getJson("v1/files", { method: "POST", body: form });
}

/** The address of a picture in memory; whoever has it lets it go with `URL.revokeObjectURL`. */
export async function pictureUrl(path, signal) {
  return URL.createObjectURL(await (await request(path, { signal })).blob());
}

export async function getText(path, signal) {
  return (await request(path, { signal })).text();
}

async function send(path, options) {
  const headers = new Headers(options.headers);
  if (apiKey) headers.set("Authorization", `Bearer ${apiKey}`);
  try {
    return await fetch(path, { ...options, headers, cache: "no-store" });
  } catch (error) {
    if (error.name === "AbortError") throw error;
    throw new ApiError("The server cannot be reached. Is it running?", "unreachable", 0);
  }
}

async function errorOf(response) {
  let error = {};
  try {
    error = (await response.json()).error ?? {};
  } catch {
    // Not the server's own words: a proxy's page, say.
  }
  const sentence = error.message ?? `The server answered with status ${response.status}.`;
  return new ApiError(sentence, error.code ?? "unknown", response.status);
}

/**
 * The server-sent events of a job, from the first to `done`. A connection that breaks is taken up again where it was.
 * EventSource cannot send a key, so the stream is read here.
 */
export async function* jobEvents(jobId, signal) {
  let lastId = 0;
  let failures = 0;
  while (!signal.aborted) {
    try {
      const headers = { Accept: "text/event-stream", "Last-Event-ID": String(lastId) };
      const response = await request(`v1/jobs/${jobId}/events`, { headers, signal });
      for await (const event of parse(response.body)) {
        failures = 0;
        lastId = event.id ?? lastId;
        yield event.data;
        if (event.data.type === "done") return;
      }
    } catch (error) {
      if (signal.aborted) return;
      const heals = error.status === 0 || error.status >= 500 || !(error instanceof ApiError);
      if (!heals || failures >= 20) throw error;
    }
    failures += 1;
    await new Promise((resolve) => setTimeout(resolve, Math.min(250 * 2 ** failures, 5000)));
  }
}

async function* parse(body) {
  const reader = body.pipeThrough(new TextDecoderStream()).getReader();
  let buffer = "";
  try {
    for (;;) {
      const { done, value } = await reader.read();
      if (done) return;
      buffer += value.replaceAll("\r", "");
      for (let end = buffer.indexOf("\n\n"); end >= 0; end = buffer.indexOf("\n\n")) {
        const event = eventOf(buffer.slice(0, end));
        buffer = buffer.slice(end + 2);
        if (event !== null) yield event;
      }
    }
  } finally {
    reader.cancel().catch(() => {});
  }
}

function eventOf(block) {
  let id = null;
  const data = [];
  for (const line of block.split("\n")) {
    if (line.startsWith("id:")) id = Number(line.slice(3));
    else if (line.startsWith("data:")) data.push(line.slice(5).replace(/^ /, ""));
  }
  return data.length ? { id, data: JSON.parse(data.join("\n")) } : null;
}
