// The fragment of an address: what a completion was asked for, in JSON and base64url. Nothing in it is trusted.

/** Return the fragment that holds `given`. */
export function fragmentOf(given) {
  const bytes = new TextEncoder().encode(JSON.stringify(given));
  const text = btoa(Array.from(bytes, (byte) => String.fromCharCode(byte)).join(""));
  return `#${text.replaceAll("+", "-").replaceAll("/", "_").replaceAll("=", "")}`;
}

/** Return what the fragment of this address holds; null if it is none of ours. */
export function linked() {
  try {
    const text = atob(location.hash.slice(1).replaceAll("-", "+").replaceAll("_", "/"));
    const found = JSON.parse(new TextDecoder().decode(Uint8Array.from(text, (c) => c.charCodeAt(0))));
    return typeof found?.prompt === "string" ? found : null;
  } catch {
    return null;
  }
}
