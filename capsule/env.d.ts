// The same two declarations as vite/client's, so that they merge where Vite's types are installed.
interface ImportMetaEnv {
  /** The public address of the app's model; present only in builds made while managed inference is on. */
  readonly VITE_SERVICE_AI_URL?: string;
}

interface ImportMeta {
  readonly env: ImportMetaEnv;
}
