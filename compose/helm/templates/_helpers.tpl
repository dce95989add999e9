{{/* Labels by which a part's pods are selected: (dict "root" $ "part" "prefill"). */}}
{{- define "splitserve.selector" -}}
app.kubernetes.io/instance: {{ .root.Release.Name }}
app.kubernetes.io/component: {{ .part }}
{{- end }}

{{- define "splitserve.labels" -}}
{{ include "splitserve.selector" . }}
app.kubernetes.io/name: {{ .root.Chart.Name }}
app.kubernetes.io/version: {{ .root.Chart.AppVersion | quote }}
app.kubernetes.io/managed-by: {{ .root.Release.Service }}
{{- end }}

{{/* Pods' names are worker ids, of at most 64 characters, and services' names begin with a letter. */}}
{{- define "splitserve.metadata" -}}
{{- if not (regexMatch "^[a-z][-a-z0-9]{0,37}[a-z0-9]$" .root.Release.Name) }}
{{- fail "the release's name must have 2 to 39 of a-z, 0-9 and -, and begin with a letter" }}
{{- end -}}
name: {{ .root.Release.Name }}-{{ .part }}
labels: {{- include "splitserve.labels" . | nindent 2 }}
{{- end }}

{{/* What all containers share: nobody is root, and no process gets more rights than it has. */}}
{{- define "splitserve.pod-security" -}}
{runAsNonRoot: true, runAsUser: 10001, fsGroup: 10001, seccompProfile: {type: RuntimeDefault}}
{{- end }}
{{- define "splitserve.container-security" -}}
{allowPrivilegeEscalation: false, readOnlyRootFilesystem: true, capabilities: {drop: [ALL]}}
{{- end }}

{{/* The volume with the cluster token alone. */}}
{{- define "splitserve.token-volume" -}}
name: keys
secret:
  secretName: {{ .Values.keys.secret }}
  defaultMode: 0440
  items: [{key: cluster_token, path: cluster_token}]
{{- end }}
