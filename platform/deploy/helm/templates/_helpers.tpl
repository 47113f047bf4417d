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

{{- define "loramux.image" -}}
{{ required "image.repository is required: build an image with platform/deploy/container/Dockerfile" .Values.image.repository }}:{{ .Values.image.tag | default .Chart.AppVersion }}
{{- end }}

{{/* The parts that the server and the schema upgrade share. */}}
{{- define "loramux.container" -}}
image: {{ include "loramux.image" . | quote }}
imagePullPolicy: {{ .Values.image.pullPolicy }}
securityContext:
  allowPrivilegeEscalation: false
  readOnlyRootFilesystem: true
  capabilities: {drop: [ALL]}
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
  {{- range $name, $value := .Values.settings }}
  - name: LORAMUX_{{ upper $name }}
    value: {{ toString $value | quote }}
  {{- end }}
  {{- range $name, $value := .Values.env }}
  - name: {{ $name }}
    value: {{ toString $value | quote }}
  {{- end }}
{{- end }}

{{- define "loramux.pod" -}}
serviceAccountName: {{ .Values.serviceAccount.name }}
automountServiceAccountToken: false
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
