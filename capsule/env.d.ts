// The same two declarations as in vite/client, so that they merge if Vite's types are installed.
interface ImportMetaEnv {
  /** The public address of the app's model. Set only in builds made while managed inference is on. */
  readonly VITE_SERVICE_AI_URL?: string;
}

interface ImportMeta {
  readonly env: ImportMetaEnv;
}
