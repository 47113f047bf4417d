{{- define "loramux.name" -}}
{{- if contains "loramux" .Release.Name }}{{ .Release.Name }}{{ else }}{{ .Release.Name }}-loramux{{ end -}}
{{- end }}

{{- define "loramux.selector" -}}
app.kubernetes.io/name: loramux
app.kubernetes.io/instance: {{ .Release.Name }}
{{- end }}

{{- define "loramux.labels" -}}
{{ include "loramux.selector" . }}
app.kubernetes.io/version: {{ .Chart.AppVersion | quote }}
app.kubernetes.io/managed-by: {{ .Release.Service }}
{{- end }}

{{/* Ray's own nodes: the head and the engines. KubeRay adds app.kubernetes.io/name, by which its service finds the
head. */}}
{{- define "loramux.raySelector" -}}
app.kubernetes.io/component: ray
app.kubernetes.io/instance: {{ .Release.Name }}
{{- end }}

{{/* The service that KubeRay creates for the head. */}}
{{- define "loramux.rayAddress" -}}
{{ include "loramux.name" . }}-head-svc:6379
{{- end }}

{{- define "loramux.rayToken" -}}
- name: RAY_AUTH_MODE
  value: token
- name: RAY_AUTH_TOKEN
  valueFrom:
    secretKeyRef:
      name: {{ required "ray.tokenSecret is required: a secret with the key auth_token" .Values.ray.tokenSecret }}
      key: auth_token
{{- end }}

{{- define "loramux.image" -}}
{{ required "image.repository is required: build an image with platform/deploy/container/Dockerfile" .Values.image.repository }}:{{ .Values.image.tag | default .Chart.AppVersion }}
{{- end }}

{{- define "loramux.confined" -}}
image: {{ include "loramux.image" . | quote }}
imagePullPolicy: {{ .Values.image.pullPolicy }}
securityContext:
  allowPrivilegeEscalation: false
  readOnlyRootFilesystem: true
  capabilities: {drop: [ALL]}
{{- end }}

{{/* A scalar or a list as the text of a variable. Helm reads numbers as floating-point numbers, and would write large
ones with an exponent. */}}
{{- define "loramux.text" -}}
{{- if kindIs "slice" . }}
{{- range $index, $item := . }}{{ if $index }},{{ end }}{{ include "loramux.text" $item }}{{ end }}
{{- else if and (kindIs "float64" .) (eq (float64 .) (floor .)) }}
{{- int64 . }}
{{- else }}
{{- toString . }}
{{- end }}
{{- end }}

{{/* The parts that the server and the schema upgrade share. */}}
{{- define "loramux.container" -}}
{{ include "loramux.confined" . }}
envFrom:
  - secretRef:
      name: {{ required "existingSecret is required: a secret with LORAMUX_ADMIN_KEY and the other keys of values.yaml" .Values.existingSecret }}
env:
  - name: LORAMUX_DATABASE_URL
    value: {{ required "database.url is required" .Values.database.url | quote }}
  - name: LORAMUX_BLOB_URL
    value: {{ required "blobs.url is required" .Values.blobs.url | quote }}
  - name: LORAMUX_SERVED_NAME
    value: {{ required "model.servedName is required" .Values.model.servedName | quote }}
  {{- if .Values.shareRequests }}
  - name: POD_IP
    valueFrom: {fieldRef: {fieldPath: status.podIP}}
  - name: LORAMUX_PEER_ADDRESS
    value: $(POD_IP):8002
  {{- end }}
  {{- if .Values.picker.enabled }}
  - name: LORAMUX_ROUTING
    value: "off"
  {{- end }}
  {{- if .Values.ray.enabled }}
  - name: LORAMUX_CLUSTER
    value: {{ include "loramux.rayAddress" . | quote }}
  - name: LORAMUX_DEVICE
    value: cpu
  # The directory of Ray's event log belongs to the pod's Ray node, which is another user.
  - name: RAY_event_log_reporter_enabled
    value: "0"
  {{- include "loramux.rayToken" . | nindent 2 }}
  {{- end }}
  {{- range $name, $value := .Values.settings }}
  - name: LORAMUX_{{ upper $name }}
    value: {{ include "loramux.text" $value | quote }}
  {{- end }}
  {{- range $name, $value := .Values.env }}
  - name: {{ $name }}
    value: {{ include "loramux.text" $value | quote }}
  {{- end }}
{{- end }}

{{- define "loramux.pod" -}}
serviceAccountName: {{ .Values.serviceAccount.name }}
automountServiceAccountToken: false
{{ include "loramux.anyPod" . }}
{{- end }}

{{/* The parts that all pods share. */}}
{{- define "loramux.anyPod" -}}
# Otherwise, the service `loramux` would add variables such as LORAMUX_PORT, which the server takes for settings.
enableServiceLinks: false
securityContext:
  runAsNonRoot: true
  runAsUser: 10001
  runAsGroup: 10001
  fsGroup: 10001
  seccompProfile: {type: RuntimeDefault}
{{- with .Values.image.pullSecrets }}
imagePullSecrets:
  {{- range . }}
  - name: {{ . }}
  {{- end }}
{{- end }}
{{- with .Values.nodeSelector }}
nodeSelector: {{- toYaml . | nindent 2 }}
{{- end }}
{{- with .Values.tolerations }}
tolerations: {{- toYaml . | nindent 2 }}
{{- end }}
{{- with .Values.affinity }}
affinity: {{- toYaml . | nindent 2 }}
{{- end }}
{{- end }}

{{/* The parts that the containers of Ray's head and of the engines share. They get no secret but Ray's token and the
bucket's, because Ray runs code for every program that has the token. */}}
{{- define "loramux.rayNode" -}}
{{ include "loramux.confined" . }}
command: [loramux-entrypoint, ray-node]
env:
  - name: RAY_USAGE_STATS_ENABLED
    value: "0"
  # Otherwise, Ray runs the engines with niceness 15.
  - name: RAY_worker_niceness
    value: "0"
  {{- range list "AWS_ACCESS_KEY_ID" "AWS_SECRET_ACCESS_KEY" }}
  - name: {{ . }}
    valueFrom: {secretKeyRef: {name: {{ $.Values.existingSecret }}, key: {{ . }}, optional: true}}
  {{- end }}
  {{- range $name, $value := .Values.env }}
  - name: {{ $name }}
    value: {{ include "loramux.text" $value | quote }}
  {{- end }}
volumeMounts:
  - {name: data, mountPath: /var/lib/loramux}
  - {name: model, mountPath: /models/base, readOnly: true}
  - {name: tmp, mountPath: /tmp}
{{- end }}

{{- define "loramux.rayVolumes" -}}
- name: data
  emptyDir: {}
- name: model
  {{- .Values.model.volume | toYaml | nindent 2 }}
- name: tmp
  emptyDir: {}
{{- end }}
