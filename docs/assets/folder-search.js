// Copyright (c) The zero_topo authors. SPDX-License-Identifier: Apache-2.0
// A browser refuses a Worker to a page opened from a folder, and the search box needs one: its code runs in a frame then.
if (location.protocol === "file:") {
  window.IFrameWorker = class extends EventTarget {
    constructor(url) {
      super();
      const frame = document.createElement("iframe");
      frame.hidden = true;
      (document.body || document.documentElement).append(frame);
      this.inner = frame.contentWindow;
      // What the worker sends goes to the listeners of this object.
      this.inner.postMessage = data => this.dispatchEvent(new MessageEvent("message", { data }));
      this.inner.importScripts = (...urls) => Promise.all(urls.map(each => this.load(each)));
      this.loaded = this.load(url);
    }
    load(url) {
      return new Promise((done, failed) => {
        const script = this.inner.document.createElement("script");
        script.src = new URL(url, location.href);
        script.onload = done;
        script.onerror = failed;
        this.inner.document.body.append(script);
      });
    }
    postMessage(data) {
      this.loaded.then(() => this.inner.dispatchEvent(new MessageEvent("message", { data })));
    }
  };
  window.Worker = window.IFrameWorker;
}
